"""`prunecli compare-models`, `compare-heads` and `compare-languages`."""

from pathlib import Path
from typing import Any

import prunecli
from prunecli.commands import console
from prunecli.commands.checkpoints import (
    CHECKPOINT,
    checkpoint_directory,
    checkpoint_or_demo,
    checkpoints_here,
    with_demo_text,
)
from prunecli.commands.command import OutputOptions, command, plot_option, result_option
from prunecli.errors import StatisticsError, UsageError
from prunecli.evaluation.options import SimilarityOptions, labels_for
from prunecli.methods.options import LanguageOptions
from prunecli.options import CheckpointPath, advanced_option, argument, option
from prunecli.progress import unsaid
from prunecli.text.choice import TextChoice, split_option


class CompareModels(OutputOptions, TextChoice, SimilarityOptions):
    """Options of the command."""

    LEFT_OUT = ("whole_files", "labelled")

    checkpoint: CheckpointPath | None = CHECKPOINT
    other: CheckpointPath | None = argument(
        "Checkpoint to compare with. Default: CHECKPOINT is compared with itself, component by component.",
        "OTHER",
        role="checkpoint",
    )
    split: str = split_option("Split of --data.", "test")
    benchmarks: tuple[CheckpointPath, ...] = advanced_option(
        "Checkpoint like CHECKPOINT from another seed, whose similarity to it counts as 100%; may be given again.",
        (),
        metavar="CHECKPOINT",
        role="checkpoint",
    )
    output: Path = result_option("similarity.json", "File of the similarities.")
    plot: Path | None = plot_option("Draw the heat maps of all components")


@command
def compare_models(options: CompareModels) -> None:
    """Compare what the components of two models make of the same sentences: every attention and every FFN.

    The decoder reads the references. Several language pairs are compared one by one, and averaged.
    """
    from prunecli.analysis.model_similarity import compare, portions_of
    from prunecli.evaluation.on_text import measured_text
    from prunecli.model.history import pruned_pairs
    from prunecli.modules.devices import choose_devices
    from prunecli.modules.fitting import dtype_name, fitting_dtype

    options.check_outputs()
    if options.checkpoint is not None:
        named = filter(None, (options.checkpoint, options.other))
        compared = [checkpoint_directory(path) for path in named]
    elif here := checkpoints_here():
        of = f", the first of {len(here)} checkpoints here" if len(here) > 1 else ""
        console.note(f"No checkpoint given: comparing the bundled demo model with {here[0]}{of}.")
        compared = [prunecli.demo.CHECKPOINT, here[0]]
    else:
        compared = [checkpoint_or_demo(None)]
    if len(compared) == 1:
        of_two = ("benchmarks", "random_baseline")
        options.refuse(of_two, "goes with two models", "Name the checkpoint to compare with.")
    labels = labels_for([*compared, *map(checkpoint_directory, options.benchmarks)])
    opened = {label: prunecli.open_model(path) for label, path in labels.items()}
    dtype = fitting_dtype(opened, choose_devices(options.device), options.dtype, say=console.note)
    options = options.updated(dtype=dtype_name(dtype))
    choice = with_demo_text(options, compared)
    say = unsaid if choice.files else console.note
    data = measured_text(next(iter(opened.values())), choice, "This", say, task="mlm")
    directions = data.pairs
    if options.pairs is None and options.langs is None:
        directions = pruned_pairs(list(labels.values()), directions)
    portions = portions_of(data.text, directions)
    result, width = compare(opened, portions, options, console.progress())

    def blocks() -> console.Blocks:
        if result.pairs:
            yield from result.shown
        else:
            yield "The models have no component in common: only the matrices are written."
        for name, left_out in zip(result.checkpoints, result.left_out.values(), strict=False):
            for what, why in (("removed", "removed"), ("constant", "the same output for every sentence")):
                if parts := left_out[what]:
                    shown = ", ".join(parts[:3]) + (f", … ({len(parts)} in all)" if len(parts) > 3 else "")
                    yield f"Left out of {name}, {why}: {shown}."
        least = min(map(len, portions))
        many = f"each of {len(portions)} pairs, averaged" if len(portions) > 1 else portions[0].split
        yield f"{least:,} sentences of {many}."
        if "cka" in result.matrices and least < width:
            yield (
                f"With fewer sentences than the width of the outputs ({least:,} < {width:,}) CKA comes out too high: "
                "give more, or --benchmarks to compare with."
            )

    options.finish(result, blocks())


class CompareHeads(OutputOptions):
    """Options of the command."""

    first: Path = argument("Scores of heads, from score-heads.", "A.json", ..., role="input")
    second: Path = argument("Scores of the same heads on another text or task.", "B.json", ..., role="input")
    output: Path = result_option("head-comparison.json")
    plot: Path | None = plot_option("Also draw a point for each head")


@command
def compare_heads(options: CompareHeads) -> None:
    """Compare the importance of heads on two texts or tasks.

    Correlations of all heads and of each kind of attention: Pearson's of the values, Spearman's of their ranks.
    """
    from prunecli.results.unit_scores import read_scores

    first, second = options.first, options.second
    if first.resolve() == second.resolve():
        raise UsageError(f"{first} is given twice", "Name the scores on two texts or tasks.")
    scores = read_scores(first), read_scores(second)
    options.check_outputs()

    from prunecli.results.similarity import compare_heads as compare

    same_name = first.name == second.name
    comparison = compare(scores, (str(first), str(second)) if same_name else (first.name, second.name))

    blocks: list[Any] = [*comparison.shown]
    if comparison.left_out:
        blocks.append(f"Heads that only one of the two has are left out: {comparison.left_out:,}.")
    if len({model.fingerprint for model in comparison.models}) > 1:
        blocks.append("The scores are of two models: heads are compared by name and original number.")
    options.finish(comparison, blocks)


class CompareLanguages(OutputOptions, LanguageOptions):
    """Options of the command."""

    gates: tuple[Path, ...] = argument(
        "Gate statistics. Default: ./gates.json.", "GATES.json", (Path("gates.json"),), role="input"
    )
    output: Path = option(
        "File of the result. Default: languages.json; for texts texts.json.",
        Path(),
        flag="--output -o",
        role="output",
    )


@command
def compare_languages(options: CompareLanguages) -> None:
    """Compare languages by the experts that they use, or texts by those of a language model.

    Shows how alike the experts are that language pairs with a common source or target select, which languages
    have like importance vectors, and how many experts each layer keeps under a global threshold. Of texts: how alike
    the experts are that they select, and which are those of one alone.
    """
    from prunecli.analysis.language_comparison import compare_by_language, compare_by_text
    from prunecli.results.gates import GateStatistics, read_gates
    from prunecli.text.plain import MIXED

    files = options.gates
    if "gates" not in options.model_fields_set and not files[0].is_file():
        raise StatisticsError(
            "gates.json: no such file", "Name a statistics file, or make it: prunecli collect-gates."
        )
    statistics = GateStatistics.merged([read_gates(path) for path in files], [str(path) for path in files])
    is_text = statistics.mode == "text"
    if options.output == Path():
        options = options.updated(output=Path("texts.json" if is_text else "languages.json"))
    options.check_outputs()
    if statistics.mixed:
        console.note(MIXED)
    if is_text:
        names = ["balance", "langs", "layer_metric", "groups"]
        if options.strategy != "per-layer":
            names.append("strategy")
        why = "is for translation; these statistics are of texts."
        options.refuse(names, why, "`texts` chooses among the texts.")
    else:
        why = "names texts of language models; these statistics are by pairs of languages."
        options.refuse(["texts"], why, "Name languages with `langs`.")
    result = (compare_by_text if is_text else compare_by_language)(
        statistics, options, [path.name for path in files]
    )
    options.finish(result, result.blocks)
