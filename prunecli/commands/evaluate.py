"""`prunecli evaluate`: the quality of checkpoints, side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from prunecli import processes
from prunecli.commands import console
from prunecli.commands.checkpoints import (
    ALL,
    CHECKPOINTS,
    DEMO,
    TASK,
    DemoName,
    checkpoints_or_demo,
    demo_text,
    reads_whole,
    report_run,
    running_by_layer,
    texts_or_demo,
)
from prunecli.commands.command import OutputOptions, command, plot_option, result_option, write_table
from prunecli.errors import PruneError
from prunecli.evaluation.options import EvaluationOptions
from prunecli.options import TEXT, CheckpointPath, option
from prunecli.tensors.quantities import counted
from prunecli.text.choice import NAMED_TEXT, NamedText, TextChoice
from prunecli.text.files import given_names
from prunecli.text.tasks import TaskName

if TYPE_CHECKING:
    from prunecli.results.evaluation import Evaluation, Score

ABOUT_A_MINUTE = 2400
"""Translations of the demo model and of models pruned from it that take about a minute on one core.

The demo model makes 130 a second; models that are pruned too far make 25, since their outputs run on.
"""
PAIRS_SHOWN = 12
"""With more pairs than this, only the means are shown unless --all-pairs."""
WIDE = 4
"""With more checkpoints than this, a block holds chrF++ alone, so that the table fits 120 columns."""
LABEL_WIDTH = 12
LONGEST_EXAMPLE = 200
"""Letters of an example; the rest is left out."""
Scored: TypeAlias = dict[tuple[str, ...], Sequence[Mapping[str, Any]]]
"""First cells of a row -> the scores of each checkpoint."""
SPREAD = {"mean": "+.1f", "std": ".1f", "lowest": "+.1f", "highest": "+.1f"}
"""Figure of a difference over pairs -> its form."""
DRAWN = {
    "translation": {"chrf++": "chrF++", "bleu": "BLEU"},
    "lm": {"perplexity": "perplexity", "kl_divergence": "KL divergence, nats"},
    "mlm": {"loss": "loss of the hidden tokens, nats"},
    "classification": {"accuracy": "accuracy"},
    "embedding": {
        "cosine": "cosine to the first",
        "spearman": "Spearman's correlation",
        "retrieval": "retrieved",
    },
}
"""Task -> score -> the title of its panel."""


class Evaluate(OutputOptions, TextChoice, EvaluationOptions):
    """Options of the command."""

    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"files"})

    checkpoints: tuple[CheckpointPath, ...] = CHECKPOINTS
    text: tuple[NamedText, ...] = NAMED_TEXT
    split: str = option("test", "Split of --data.", panel=TEXT, recorded=False)
    task: TaskName | None = TASK
    all_pairs: bool = option(False, f"Show every pair, even more than {PAIRS_SHOWN}.")
    demo_model: DemoName = DEMO
    everything: bool = ALL
    output: Path = result_option("evaluation.json")
    plot: Path | None = plot_option("Also draw the scores against the fraction removed")


@command(Evaluate)
def evaluate(options: Evaluate) -> None:
    """Translate with each checkpoint and score: chrF++, chrF, BLEU, spBLEU, COMET, length, over-generation.

    Language models are measured by perplexity and by the divergence of their next tokens, masked ones by the loss of
    hidden tokens, classifiers by accuracy, embedding models by cosine, Spearman's correlation and retrieval. The first
    checkpoint is the baseline. The same command resumes an interrupted run; torchrun -m prunecli evaluate … splits the
    sentences among processes.
    """
    running_by_layer(options.memory)  # before torch is imported

    from prunecli.evaluation.evaluate import evaluate as run
    from prunecli.evaluation.options import labels_for

    named, gate = options.checkpoints, options.gate
    is_limitless = named or options.data or options.source_file or options.max_sentences or options.everything
    files = texts_or_demo(options.text, options.demo_model, "test", named)
    options = options.model_copy(
        update={
            "files": tuple(file.path for file in files),
            "names": given_names(files),
            "whole_files": reads_whole(options, is_demo=bool(files) and not options.text),
            "demo": demo_text(named),
            "most_translations": None if is_limitless else ABOUT_A_MINUTE,
        }
    )
    if processes.rank() == 0:  # which alone writes
        options.check_outputs()
    labels = labels_for(checkpoints_or_demo(named, options.demo_model))
    result = run(
        labels,
        options,
        options,
        options.output,
        task=options.task,
        force=options.force,
        progress=console.progress(options.quiet),
        say=console.note,
        warn=console.warn,
        report=lambda label, work: report_run(work, label),
    )
    if result is None:  # one of several processes: the first goes on
        return
    write_table(options.table, result, force=options.force)
    if options.plot is not None:
        _plot(options.plot, result, labels)
    options.show(result.to_json, lambda: _show(result, options.all_pairs))
    if missed := list(gate.missed(result)):
        raise PruneError("\n".join(missed))


def _show(evaluation: Evaluation, all_pairs: bool) -> None:
    """Print the tables, what is wrong with the outputs, and examples if there is little to read."""
    if evaluation.task == "translation":
        _show_translation(evaluation, all_pairs)
    else:
        _show_task(evaluation)
    for line in evaluation.ruined:
        console.out(line)
    if not evaluation.examples or len(evaluation.results) > WIDE:
        return
    rows = []
    for example in evaluation.examples:
        name = ", ".join(filter(None, ["input", example.pair or example.text]))
        reference = {} if example.reference is None else {"reference": example.reference}
        for label, text in {name: example.source, **reference, **example.outputs}.items():
            line = " ".join(text.split())
            rows.append([label, line if len(line) <= LONGEST_EXAMPLE else f"{line[:LONGEST_EXAMPLE]}…"])
        rows.append(["", ""])
    title = "Where the outputs differ most" if len(evaluation.results) > 1 else "The worst outputs"
    console.table(title, ["", "text"], rows[:-1], text_columns=2)


def _show_translation(evaluation: Evaluation, all_pairs: bool) -> None:
    from prunecli.evaluation.scoring import too_few

    results, pairs, count = evaluation.results, evaluation.pairs, len(evaluation.pairs)
    split, sentences = evaluation.data["split"], evaluation.data["sentences"]
    few = None if evaluation.significance is None else too_few(sentences, "sentences")
    if few:
        evaluation = evaluation.model_copy(update={"significance": None})
    if count > 1 and (all_pairs or count <= PAIRS_SHOWN):
        by_pair: Scored = {(pair,): [result.pairs[pair] for result in results] for pair in pairs}
        by_pair["mean",] = [result.mean for result in results]
        _show_side_by_side(f"{split}, {sentences:,} sentences a pair", ["pair"], by_pair, evaluation)
    _show_means(evaluation)
    if evaluation.groups:
        groups = [(one["source"], one["target"], str(one["pairs"])) for one in results[0].by_group]
        by_group: Scored = {group: [own.by_group[at] for own in results] for at, group in enumerate(groups)}
        _show_side_by_side("Means by group of languages", ["from", "to", "pairs"], by_group, evaluation)
        if len(results) > 1:
            _show_differences(evaluation, groups)
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


def _show_means(evaluation: Evaluation) -> None:
    """Print a row per checkpoint: the mean over the pairs, or the scores of the only pair."""
    pairs, columns = evaluation.pairs, _columns(evaluation, evaluation.signatures)
    many = len(pairs) > 1
    counts = ["worse", "better"] if evaluation.significance is not None and many else []
    rows = []
    for result in evaluation.results:
        mean = result.mean
        own = mean if many else result.pairs[pairs[0]]
        significant = mean.get("significant", {}).get("chrf++", {})
        rows.append(
            [
                result.checkpoint,
                *(_cell(own, name, evaluation) for name in columns),
                f"{mean['length_ratio']:.2f}",
                f"{mean['over_generated']:.1%}",
                *(str(significant.get(name, "")) for name in counts),
            ]
        )
    over = f"mean of {len(pairs)} pairs" if many else pairs[0]
    title = f"{evaluation.data['split']}, {over}, beam {evaluation.decoding['beam']}"
    titles = [score.title for score in columns.values()]
    console.table(title, ["checkpoint", *titles, "length", "over-gen.", *counts], rows)


def _show_side_by_side(
    title: str,
    keys: Sequence[str],
    rows: Scored,
    evaluation: Evaluation,
) -> None:
    """Print a table with a block of columns for each checkpoint.

    Args:
        keys: headings of the first cells.
    """
    second = "spbleu" if "spbleu" in evaluation.signatures else "bleu"
    metrics = _columns(evaluation, ("chrf++", second) if len(evaluation.results) <= WIDE else ("chrf++",))
    columns = [*keys]
    for result in evaluation.results:
        first, *others = (score.title for score in metrics.values())
        label = textwrap.fill(result.checkpoint, LABEL_WIDTH)
        columns += [f"{label}\n{first}", *(f"\n{other}" for other in others)]
    cells = [
        [*key, *(_cell(own, name, evaluation) for own in scores for name in metrics)]
        for key, scores in rows.items()
    ]
    texts = min(len(keys), 2)
    console.table(title, columns, cells, text_columns=texts, keys=texts)


def _show_differences(evaluation: Evaluation, groups: Sequence[tuple[str, str, str]]) -> None:
    """Print chrF++ of each other checkpoint less the first one's, over the pairs of each group and over all pairs."""
    first, *others = evaluation.results
    columns, means = (
        ["from", "to", "pairs"],
        [[own.by_group[at] for own in others] for at in range(len(groups))],
    )
    if len(evaluation.pairs) > 1:
        groups = [*groups, ("all", "", str(len(evaluation.pairs)))]
        means.append([own.mean for own in others])
    for result in others:
        label = textwrap.fill(result.checkpoint, LABEL_WIDTH)
        columns += [f"{label}\nmean", *(f"\n{name}" for name in [*SPREAD][1:])]
    rows = [
        [
            *group,
            *(
                f"{mean['difference']['chrf++'][name]:{form}}"
                for mean in own
                for name, form in SPREAD.items()
            ),
        ]
        for group, own in zip(groups, means, strict=True)
    ]
    title = f"chrF++, difference from {first.checkpoint} over the pairs"
    console.table(title, columns, rows, text_columns=2, keys=2)


def _show_task(evaluation: Evaluation) -> None:
    """Print the table of a task without pairs, by text too, and what its marks mean."""
    from prunecli.evaluation.scoring import too_few

    data, results, test, few = evaluation.data, evaluation.results, evaluation.significance, None
    # McNemar's test is exact: where there is too little it finds nothing.
    if test is not None and not test["test"].startswith("McNemar"):
        few = too_few(
            test.get("examples", data["texts"]), "windows" if "windows" in test["test"] else "texts"
        )
    if few:
        test = None
        console.warn(few)
    columns = _columns(evaluation, {name for result in results for name in result.scores})
    texts = counted(data["texts"], "document" if data.get("whole_files") else "text")
    title = f"{evaluation.task}, {', '.join(data['files'])}, {texts}"
    numbers, by_text = {result.scores.get("tokens") for result in results}, dict(columns)
    if len(numbers) == 1 and (score := columns.pop("tokens", None)):
        title += f", {numbers.pop():,} {score.title}"
    rows = []
    for result in results:
        p_value = result.p_value
        marked = test["of"] if test is not None and p_value is not None and p_value < test["level"] else None
        rows.append([result.checkpoint, *_cells(columns, result.scores, marked)])
    console.table(title, ["checkpoint", *(score.title for score in columns.values())], rows)
    if results[0].by_text:
        rows = [
            [name, result.checkpoint, *_cells(by_text, result.by_text[name])]
            for name in results[0].by_text
            for result in results
        ]
        titles = ["text", "checkpoint", *(score.title for score in by_text.values())]
        console.table("By text", titles, rows, text_columns=2, keys=2)
    if test is not None:
        console.out(f"* differs from {test['baseline']} with p < {test['level']} ({test['test']}).")


def _columns(evaluation: Evaluation, names: Collection[str]) -> dict[str, Score]:
    """The scores of the task that are among `names`, in the order of the table."""
    from prunecli.results.evaluation import SCORES

    return {name: score for name, score in SCORES[evaluation.task].items() if name in names}


def _cell(scores: Mapping[str, Any], metric: str, evaluation: Evaluation) -> str:
    test = evaluation.significance
    p_value = scores.get("bootstrap", {}).get(metric, {}).get("p_value")
    significant = test is not None and p_value is not None and p_value < test["level"]
    return f"{scores[metric]:.1f}{'*' if significant else ''}"


def _cells(columns: Mapping[str, Score], scores: Mapping[str, Any], marked: str | None = None) -> list[str]:
    """The scores as the columns show them; blank where one is missing, a star at the one that is `marked`."""
    return [
        f"{scores[name]:{score.form}}{'*' if name == marked else ''}" if name in scores else ""
        for name, score in columns.items()
    ]


def _plot(path: Path, evaluation: Evaluation, checkpoints: Mapping[str, Path]) -> None:
    """Draw evaluation.json; `checkpoints` are the directories of its labels."""
    from prunecli.analysis.removed import kept_of_one_training, removed
    from prunecli.model.checkpoint import open_model
    from prunecli.report.charts import Point
    from prunecli.report.pictures import reduction_curves, training_curves
    from prunecli.report.render import save_pictures

    results = evaluation.results
    opened = [open_model(checkpoints[result.checkpoint]) for result in results]
    unit, lost = removed(opened)
    fractions = [one.fraction for one in lost]
    kept = kept_of_one_training(opened, fractions)
    pictures = []
    for name, title in DRAWN[evaluation.task].items():
        if evaluation.task != "translation" and any(name not in own.scores for own in results[1:] or results):
            continue
        # The first checkpoint has no divergence.
        scores = [float((result.scores or result.mean).get(name, 0.0)) for result in results]
        if kept is not None:
            caption = f"{title} through the training"
            pictures.append(training_curves(caption, scores, fractions, kept, (unit, title)))
            continue
        points = {
            index: Point(100 * fraction, score, result.checkpoint)
            for index, (fraction, score, result) in enumerate(zip(fractions, scores, results, strict=True))
        }
        wholes = [score for score, one in zip(scores, lost, strict=True) if one.is_original]
        axes, caption = (f"% of {unit} removed", title), f"{title} against the {unit} removed"
        pictures.append(reduction_curves(caption, points, dict(enumerate(lost)), axes, references=wholes))
    save_pictures([pictures], path)
