"""`evaluate --task lm|mlm|classification`: the text that is measured, and the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from prunecli.commands import console
from prunecli.evaluation.significance import too_few

if TYPE_CHECKING:
    from prunecli.evaluation.tasks import OtherTask
    from prunecli.results.evaluation import Evaluation
    from prunecli.running.layerwise.session import RunReport

COLUMNS: Mapping[OtherTask, Mapping[str, tuple[str, str]]] = {
    "lm": {
        "perplexity": ("perplexity", ",.3f"),
        "bits_per_byte": ("bits/byte", ".4f"),
        "bits_per_character": ("bits/char.", ".4f"),
        "tokens": ("tokens", ",d"),
    },
    "mlm": {
        "loss": ("loss, nats", ".4f"),
        "perplexity": ("exp(loss)", ",.3f"),
        "tokens": ("hidden tokens", ",d"),
    },
    "classification": {
        "accuracy": ("accuracy", ".1%"),
        "f1": ("macro F1", ".3f"),
        "loss": ("loss, nats", ".4f"),
    },
}
"""Task -> score -> its column's title and the format of its numbers."""


def report(label: str, work: RunReport) -> None:
    """Say what a checkpoint that was run layer by layer took."""
    from prunecli.commands.memory_options import report_work

    report_work(work, label)


def show_task(evaluation: Evaluation) -> None:
    """The table, and what its marks mean."""
    test, few = evaluation.significance, None
    # McNemar's test is exact: where there is too little it finds nothing.
    if test is not None and evaluation.task != "classification":
        few = too_few(evaluation.data["texts"], "texts")
    if few:
        test = None
        console.warn(few)
    console.show(_table(evaluation, test))
    if test is not None:
        console.out(f"* differs from {test['baseline']} with p < {test['level']} ({test['test']}).")


def _table(evaluation: Evaluation, test: Mapping[str, Any] | None) -> console.Shown:
    columns = COLUMNS[cast("OtherTask", evaluation.task)]
    rows = []
    for result in evaluation.results:
        p_value = result.p_value
        marked = test["of"] if test is not None and p_value is not None and p_value < test["level"] else None
        cells = [
            f"{result.scores[name]:{form}}{'*' if name == marked else ''}"
            for name, (_, form) in columns.items()
        ]
        rows.append([result.checkpoint, *cells])
    data = evaluation.data
    title = f"{evaluation.task}, {', '.join(data['files'])}, {data['texts']:,} texts"
    return console.table(title, ["checkpoint", *(title for title, _ in columns.values())], rows)
