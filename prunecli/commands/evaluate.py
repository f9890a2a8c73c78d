"""`prunecli evaluate`: the quality of checkpoints, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prunecli import processes
from prunecli.commands import console
from prunecli.commands.checkpoints import DemoOption, checkpoints_or_demo, texts_or_demo
from prunecli.commands.groups import Helps, Without, flattened
from prunecli.commands.memory_options import MemoryOption, SpillDirOption, memory_bytes
from prunecli.commands.options import (
    AllOption,
    CheckpointsArgument,
    NamedTextOption,
    RunningDtypeOption,
    SeedOption,
    TaskOption,
    refuse_absent_text,
)
from prunecli.commands.outputs import Outputs, write_table
from prunecli.commands.text_options import TextOptions
from prunecli.errors import PruneError, UsageError

if TYPE_CHECKING:
    from prunecli.results.evaluation import Evaluation

ABOUT_A_MINUTE = 2400
"""Translations of the demo model and of models pruned from it that take about a minute on one core.

The demo model makes 130 a second; models that are pruned too far make 25, since their outputs run on.
"""
PAIRS_SHOWN = 12
"""With more pairs than this, only the means are shown unless --all-pairs."""


@flattened
def evaluate(
    checkpoints: CheckpointsArgument = None,
    texts: Annotated[TextOptions, Without({"text"})] = TextOptions(split="test", batch_tokens=2048),
    task: TaskOption = None,
    text: NamedTextOption = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="lm: tokens from one window to the next, fewer for windows that overlap; default: context - 1.",
        ),
    ] = None,
    continuations: Annotated[
        int,
        typer.Option(
            min=0,
            help="lm: from N prompts of each text, how far greedy continuations agree with the first checkpoint's.",
        ),
    ] = 0,
    beam: Annotated[int, typer.Option(min=1, help="Beam size; 1 is greedy search.")] = 4,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest output; default: 3 x source tokens + 50 (--continuations: 64), within the model's positions.",
        ),
    ] = None,
    spm: Annotated[
        Path | None,
        typer.Option(
            callback=refuse_absent_text,
            help="FLORES-200's SentencePiece model, for spBLEU; default: where sacrebleu keeps it.",
        ),
    ] = None,
    comet: Annotated[
        str | None,
        typer.Option(
            help="COMET too, by this model (Unbabel/wmt22-comet-da, or a .ckpt file); needs comet-score.",
            metavar="MODEL",
        ),
    ] = None,
    bootstrap: Annotated[
        int, typer.Option(min=0, help="Resamples of the significance test; 0: no test.")
    ] = 1000,
    significance: Annotated[
        float,
        typer.Option(metavar="LEVEL", help="A difference counts as significant below this p-value."),
    ] = 0.05,
    seed: SeedOption = 12345,
    hypotheses: Annotated[
        Path | None,
        typer.Option(
            help="Keep the outputs, SPLIT.PAIR.hyp in a folder for each checkpoint.",
            metavar="DIR",
        ),
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(
            callback=refuse_absent_text,
            help="Means by group of languages too, such as resource classes: a language, a tab and its group a line, "
            "or {language: group} in .json.",
            metavar="FILE",
        ),
    ] = None,
    all_pairs: Annotated[
        bool,
        typer.Option("--all-pairs", help=f"Show every pair, also where there are more than {PAIRS_SHOWN}."),
    ] = False,
    examples: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of inputs to show with all outputs, those where the outputs differ most (lm: with "
            "--continuations).",
        ),
    ] = 3,
    min_ratio: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="RATIO",
            help="End with status 1 if another checkpoint has less than this share of the first one's score.",
        ),
    ] = None,
    least: Annotated[
        list[str] | None,
        typer.Option(
            "--min",
            metavar="SCORE=X",
            help="End with status 1 if a checkpoint's score is lower, such as chrF++=50; may be given again.",
        ),
    ] = None,
    most: Annotated[
        list[str] | None,
        typer.Option(
            "--max",
            metavar="SCORE=X",
            help="End with status 1 if a checkpoint's score is higher, such as perplexity=20; may be given again.",
        ),
    ] = None,
    demo: DemoOption = "translation",
    everything: AllOption = False,
    memory: MemoryOption = None,
    spill_dir: SpillDirOption = None,
    dtype: RunningDtypeOption = "auto",
    outputs: Annotated[Outputs, Helps(plot="Also draw the scores against the fraction removed.")] = Outputs(
        output=Path("evaluation.json")
    ),
) -> None:
    """Translate with each checkpoint and score: chrF++, chrF, BLEU, spBLEU, COMET, length, over-generation.

    Language models, masked ones and classifiers are measured by perplexity, the loss of hidden tokens, and accuracy;
    language models also by how far their next tokens are from the first one's (KL divergence, top-1 agreement).
    Of embedding models: cosine to the first one's vectors, Spearman's correlation, accuracy of retrieval.

    The first checkpoint is the baseline: the others are tested against it by paired bootstrap; with lm and mlm
    by a paired t-test, with classification by McNemar's test.

    An interrupted translation goes on where it stopped when it is started again with the same arguments.

    Several processes share the sentences: torchrun --nproc-per-node 2 -m prunecli evaluate ….
    """
    from prunecli.commands import evaluation_tables as tables

    budget = memory_bytes(memory, spill_dir)  # before torch is imported

    from prunecli.evaluation.decoding import DecodingOptions
    from prunecli.evaluation.evaluate import evaluate as run
    from prunecli.evaluation.options import EvaluationOptions, Gate, labels_for
    from prunecli.text.files import given_names

    gate = Gate(min_ratio, _limits("--min", least), _limits("--max", most))
    limitless = bool(checkpoints or texts.data or texts.source_file or texts.max_sentences or everything)
    files = texts_or_demo(text, demo, "test", checkpoints)
    choice = texts.choice(
        checkpoints,
        files=tuple(file.path for file in files),
        names=given_names(files),
        whole_files=texts.reads_whole(is_demo=bool(files) and not text),
    )
    options = EvaluationOptions(
        decoding=DecodingOptions(beam, texts.batch_tokens, max_new_tokens),
        device=texts.device,
        dtype=dtype,
        samples=bootstrap,
        seed=seed,
        level=significance,
        spm=spm,
        comet=comet,
        hypotheses=hypotheses,
        groups=groups,
        stride=stride,
        continuations=continuations,
        memory=budget,
        spill_directory=spill_dir,
        examples=examples,
        most_translations=None if limitless else ABOUT_A_MINUTE,
        gate=gate,
    )
    if processes.rank() == 0:  # which alone writes
        outputs.check()
    labels = labels_for(checkpoints_or_demo(checkpoints, demo))
    result = run(
        labels,
        choice,
        options,
        outputs.output,
        task=task,
        force=outputs.force,
        progress=console.progress(outputs.quiet),
        say=console.note,
        warn=console.warn,
        report=tables.report,
    )
    if result is None:  # one of several processes: the first goes on
        return
    write_table(outputs.table, result, force=outputs.force)
    if outputs.plot is not None:
        tables.plot_evaluation(outputs.plot, result, labels)
    outputs.show(result.to_json, lambda: _show(result, all_pairs))
    if missed := list(gate.missed(result)):
        raise PruneError("\n".join(missed))


def _limits(option: str, given: Sequence[str] | None) -> dict[str, float]:
    """Limit of each score of `SCORE=X` texts; the score in lower case, as evaluation.json names it."""
    limits = {}
    for text in given or ():
        name, _, value = text.rpartition("=")
        try:
            limits[name.strip().lower()] = float(value)
        except ValueError as error:
            raise UsageError(f"{option} {text}: no number", f"Write {option} chrF++=50.") from error
    return limits


def _show(evaluation: Evaluation, all_pairs: bool) -> None:
    from prunecli.commands.evaluation_tables import show_examples, show_task

    if evaluation.task == "translation":
        _show_translation(evaluation, all_pairs)
    else:
        show_task(evaluation)
    show_examples(evaluation)


def _show_translation(evaluation: Evaluation, all_pairs: bool) -> None:
    from prunecli.commands.evaluation_tables import difference_table, group_table, mean_table, pair_table
    from prunecli.evaluation.significance import too_few

    count = len(evaluation.pairs)
    few = None
    if evaluation.significance is not None and (few := too_few(evaluation.data["sentences"], "sentences")):
        evaluation = evaluation.model_copy(update={"significance": None})
    if count > 1 and (all_pairs or count <= PAIRS_SHOWN):
        console.show(pair_table(evaluation))
    console.show(mean_table(evaluation))
    if evaluation.groups:
        console.show(group_table(evaluation))
        if len(evaluation.results) > 1:
            console.show(difference_table(evaluation))
    if few:
        console.warn(few)
    if (test := evaluation.significance) is not None:
        what = "* differs" if count == 1 else "Worse, better (chrF++) and *: pairs that differ"
        console.out(
            f"{what} from {test['baseline']} with p < {test['level']} "
            f"(paired bootstrap, {test['samples']:,} resamples)."
        )
    if count > PAIRS_SHOWN and not all_pairs:
        console.out(f"Means over {count} pairs; --all-pairs shows each.")
