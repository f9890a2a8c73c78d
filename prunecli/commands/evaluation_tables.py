"""The tables of `evaluate`, by pair, by group and by checkpoint, and its picture."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.commands import console
from prunecli.evaluation.significance import too_few
from prunecli.results.evaluation import SCORES, Score
from prunecli.tensors.quantities import counted

if TYPE_CHECKING:
    from prunecli.results.evaluation import Evaluation
    from prunecli.running.layerwise.runner import RunReport

WIDE = 4
"""With more checkpoints than this, a block holds chrF++ alone, so that the table fits 120 columns."""
LABEL_WIDTH = 12
LONGEST_EXAMPLE = 200
"""Letters of an example; the rest is left out."""
_TRANSLATION = SCORES["translation"]

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


def mean_table(evaluation: Evaluation) -> console.Shown:
    """One row per checkpoint: the mean over the pairs, or the scores of the only pair."""
    pairs = evaluation.pairs
    metrics = [name for name in _TRANSLATION if name in evaluation.signatures]
    compared = evaluation.significance is not None
    many = len(pairs) > 1
    over = f"mean of {len(pairs)} pairs" if many else pairs[0]
    columns = ["checkpoint", *(_TRANSLATION[name].title for name in metrics), "length", "over-gen."]
    columns += ["worse", "better"] if compared and many else []
    rows = []
    for result in evaluation.results:
        mean = result.mean
        own = mean if many else result.pairs[pairs[0]]
        row = [result.checkpoint, *(_cell(own, name, evaluation) for name in metrics)]
        row += [f"{mean['length_ratio']:.2f}", f"{mean['over_generated']:.1%}"]
        if compared and many:
            counts = mean.get("significant", {}).get("chrf++")
            row += ["", ""] if counts is None else [str(counts["worse"]), str(counts["better"])]
        rows.append(row)
    title = f"{evaluation.data['split']}, {over}, beam {evaluation.decoding['beam']}"
    return console.table(title, columns, rows)


def pair_table(evaluation: Evaluation) -> console.Shown:
    """One row per pair, one block of columns per checkpoint, the mean last."""
    results, metrics = evaluation.results, _metrics(evaluation)
    columns = ["pair", *_blocks(evaluation)]
    rows = [
        [pair, *(_cell(result.pairs[pair], name, evaluation) for result in results for name in metrics)]
        for pair in evaluation.pairs
    ]
    rows.append(["mean", *(f"{result.mean[name]:.1f}" for result in results for name in metrics)])
    sentences = evaluation.data["sentences"]
    return console.table(f"{evaluation.data['split']}, {sentences:,} sentences a pair", columns, rows)


def group_table(evaluation: Evaluation) -> console.Shown:
    """One row per group of sources and group of targets, one block of columns per checkpoint."""
    results, metrics = evaluation.results, _metrics(evaluation)
    rows = []
    for index, mean in enumerate(results[0].by_group):
        scores = (f"{result.by_group[index][name]:.1f}" for result in results for name in metrics)
        rows.append([mean["source"], mean["target"], str(mean["pairs"]), *scores])
    title = "Means by group of languages"
    return console.table(title, ["from", "to", "pairs", *_blocks(evaluation)], rows, text_columns=2, keys=2)


def difference_table(evaluation: Evaluation) -> console.Shown:
    """chrF++ of each other checkpoint less the first one's, over the pairs of each group and over all pairs."""
    first, *others = evaluation.results
    columns = ["from", "to", "pairs"]
    for result in others:
        columns += [
            f"{textwrap.fill(result.checkpoint, LABEL_WIDTH)}\nmean",
            "\nstd",
            "\nlowest",
            "\nhighest",
        ]
    rows = []
    for index, group in enumerate(first.by_group):
        spreads = [result.by_group[index]["difference"]["chrf++"] for result in others]
        rows.append([group["source"], group["target"], str(group["pairs"]), *_spreads(spreads)])
    if len(evaluation.pairs) > 1:
        spreads = [result.mean["difference"]["chrf++"] for result in others]
        rows.append(["all", "", str(len(evaluation.pairs)), *_spreads(spreads)])
    title = f"chrF++, difference from {first.checkpoint} over the pairs"
    return console.table(title, columns, rows, text_columns=2, keys=2)


def _spreads(spreads: Sequence[Mapping[str, float]]) -> list[str]:
    return [
        f"{spread[name]:{form}}"
        for spread in spreads
        for name, form in (("mean", "+.1f"), ("std", ".1f"), ("lowest", "+.1f"), ("highest", "+.1f"))
    ]


def _metrics(evaluation: Evaluation) -> tuple[str, ...]:
    """What a checkpoint's block holds."""
    second = "spbleu" if "spbleu" in evaluation.signatures else "bleu"
    return ("chrf++", second) if len(evaluation.results) <= WIDE else ("chrf++",)


def _blocks(evaluation: Evaluation) -> list[str]:
    """Headings of the checkpoints' columns."""
    metrics, columns = _metrics(evaluation), []
    for result in evaluation.results:
        label = textwrap.fill(result.checkpoint, LABEL_WIDTH)
        first, *others = (_TRANSLATION[name].title for name in metrics)
        columns += [f"{label}\n{first}", *(f"\n{title}" for title in others)]
    return columns


def _cell(scores: Mapping[str, Any], metric: str, evaluation: Evaluation) -> str:
    test = evaluation.significance
    p_value = scores.get("bootstrap", {}).get(metric, {}).get("p_value")
    significant = test is not None and p_value is not None and p_value < test["level"]
    return f"{scores[metric]:.1f}{'*' if significant else ''}"


def report(label: str, work: RunReport) -> None:
    """Say what a checkpoint that was run layer by layer took."""
    from prunecli.commands.checkpoints import report_run

    report_run(work, label)


def show_task(evaluation: Evaluation) -> None:
    """The table, and what its marks mean."""
    test, few = evaluation.significance, None
    # McNemar's test is exact: where there is too little it finds nothing.
    if test is not None and not test["test"].startswith("McNemar"):
        tested = test.get("examples", evaluation.data["texts"])
        few = too_few(tested, "windows" if "windows" in test["test"] else "texts")
    if few:
        test = None
        console.warn(few)
    console.show(_task_table(evaluation, test))
    if evaluation.results[0].by_text:
        console.show(_text_table(evaluation))
    if test is not None:
        console.out(f"* differs from {test['baseline']} with p < {test['level']} ({test['test']}).")


def show_examples(evaluation: Evaluation) -> None:
    """What is wrong with the outputs, and the examples if there is little to read."""
    for line in evaluation.ruined:
        console.out(line)
    if not evaluation.examples or len(evaluation.results) > WIDE:
        return
    rows = []
    for example in evaluation.examples:
        texts = {
            ", ".join(filter(None, ["input", example.pair or example.text])): example.source,
            **({} if example.reference is None else {"reference": example.reference}),
            **example.outputs,
        }
        rows += [[name, _clipped(text)] for name, text in texts.items()]
        rows.append(["", ""])
    title = "Where the outputs differ most" if len(evaluation.results) > 1 else "The worst outputs"
    console.show(console.table(title, ["", "text"], rows[:-1], text_columns=2))


def _clipped(text: str) -> str:
    """The first letters in one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_EXAMPLE else f"{line[:LONGEST_EXAMPLE]}…"


def _task_table(evaluation: Evaluation, test: Mapping[str, Any] | None) -> console.Shown:
    columns, data, rows = _columns(evaluation), evaluation.data, []
    texts = counted(data["texts"], "document" if data.get("whole_files") else "text")
    title = f"{evaluation.task}, {', '.join(data['files'])}, {texts}"
    numbers = {result.scores.get("tokens") for result in evaluation.results}
    if len(numbers) == 1 and (score := columns.pop("tokens", None)):
        title += f", {numbers.pop():,} {score.title}"
    for result in evaluation.results:
        p_value = result.p_value
        marked = test["of"] if test is not None and p_value is not None and p_value < test["level"] else None
        rows.append([result.checkpoint, *_cells(columns, result.scores, marked)])
    return console.table(title, ["checkpoint", *(score.title for score in columns.values())], rows)


def _text_table(evaluation: Evaluation) -> console.Shown:
    """One row per name of texts and checkpoint."""
    columns, first = _columns(evaluation), evaluation.results[0]
    rows = [
        [name, result.checkpoint, *_cells(columns, result.by_text[name])]
        for name in first.by_text
        for result in evaluation.results
    ]
    titles = [score.title for score in columns.values()]
    return console.table("By text", ["text", "checkpoint", *titles], rows, text_columns=2, keys=2)


def _columns(evaluation: Evaluation) -> dict[str, Score]:
    """Those of the task's scores that have a value."""
    return {
        name: score
        for name, score in SCORES[evaluation.task].items()
        if any(name in result.scores for result in evaluation.results)
    }


def _cells(columns: Mapping[str, Score], scores: Mapping[str, Any], marked: str | None = None) -> list[str]:
    """The scores as the columns show them; blank where one is missing, a star at the one that is `marked`."""
    return [
        f"{scores[name]:{score.form}}{'*' if name == marked else ''}" if name in scores else ""
        for name, score in columns.items()
    ]


def plot_evaluation(path: Path, evaluation: Evaluation, checkpoints: Mapping[str, Path]) -> None:
    """Draw evaluation.json; `checkpoints` are the directories of its labels."""
    from prunecli.analysis.removed import kept_of_one_training, removed
    from prunecli.model.checkpoint import open_model
    from prunecli.report.charts import Point
    from prunecli.report.pictures import reduction_curves, training_curves
    from prunecli.report.render import save_pictures

    results = evaluation.results
    titles = {
        name: title
        for name, title in DRAWN[evaluation.task].items()
        if evaluation.task == "translation" or all(name in other.scores for other in results[1:] or results)
    }
    opened = [open_model(checkpoints[result.checkpoint]) for result in results]
    unit, lost = removed(opened)
    fractions = [one.fraction for one in lost]
    kept = kept_of_one_training(opened, fractions)
    pictures = []
    for name, title in titles.items():
        scores = [
            float((result.scores or result.mean).get(name, 0.0)) for result in results
        ]  # first: no divergence
        if kept is None:
            points = {
                index: Point(100 * fraction, score, result.checkpoint)
                for index, (fraction, score, result) in enumerate(
                    zip(fractions, scores, results, strict=True)
                )
            }
            wholes = [score for score, one in zip(scores, lost, strict=True) if one.is_original]
            axes = f"% of {unit} removed", title
            caption = f"{title} against the {unit} removed"
            pictures.append(reduction_curves(caption, points, dict(enumerate(lost)), axes, references=wholes))
        else:
            caption = f"{title} through the training"
            pictures.append(training_curves(caption, scores, fractions, kept, (unit, title)))
    save_pictures([pictures], path)
