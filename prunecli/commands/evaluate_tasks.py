"""`evaluate --task lm|mlm|classification`: the text that is measured, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.commands import console
from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.data.labelled import LabelledText
    from prunecli.data.plain import PlainText
    from prunecli.evaluation.tasks import OtherTask
    from prunecli.modules.layerwise.session import Work

TRANSLATION = "translation"
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


@dataclass(frozen=True)
class TextOptions:
    """The options that name the text of a task that is not translation."""

    text: Sequence[Path]
    labelled: Path | None
    whole_files: bool
    max_sentences: int | None


def check_task(
    task: str, options: TextOptions, stride: int | None, parallel: Mapping[str, Any], memory: str | None
) -> OtherTask | None:
    """The task, or None for translation; options that belong to another task are refused.

    Args:
        parallel: option -> value of those of translation; None where it is not given.
        memory: value of --memory; None where it is not given.

    Raises:
        UsageError: no such task, or an option that does not go with it.
    """
    tasks = (TRANSLATION, *COLUMNS)
    if task not in tasks:
        raise UsageError(f"--task {task}: there is no such task", f"Known: {', '.join(tasks)}.")
    given = {
        "--text": (bool(options.text), ("lm", "mlm")),
        "--whole-files": (options.whole_files, ("lm", "mlm")),
        "--labelled": (options.labelled is not None, ("classification",)),
        "--stride": (stride is not None, ("lm",)),
        "--memory": (memory is not None, ("lm", "mlm")),
        **{name: (value is not None, (TRANSLATION,)) for name, value in parallel.items()},
    }
    for name, (is_given, own) in given.items():
        if is_given and task not in own:
            raise UsageError(f"{name} does not go with --task {task}", f"It is for: {', '.join(own)}.")
    return next((name for name in COLUMNS if name == task), None)


def text_of(task: OtherTask, options: TextOptions) -> PlainText | LabelledText:
    """The text that the options name.

    Raises:
        UsageError: none is named.
        DataError: text that cannot be used.
    """
    from prunecli.data.labelled import read_labelled
    from prunecli.data.plain import read_plain

    if task == "classification":
        if options.labelled is None:
            raise UsageError("--task classification needs labelled text", "Name a file with --labelled FILE.")
        return read_labelled(options.labelled).first(options.max_sentences)
    if not options.text:
        raise UsageError(f"--task {task} needs text", "Name one or more files with --text FILE.")
    return read_plain(options.text, whole_files=options.whole_files).first(options.max_sentences)


def report(label: str, work: Work) -> None:
    """Say what a checkpoint that was run layer by layer took."""
    from prunecli.commands.memory_options import report_work

    report_work(work, label)


def show_task(payload: Mapping[str, Any]) -> None:
    """The table, and what its marks mean."""
    console.show(_table(payload))
    test = payload["significance"]
    if test is not None:
        console.out(f"* differs from {test['baseline']} with p < {test['level']} ({test['test']}).")


def _table(payload: Mapping[str, Any]) -> console.Shown:
    columns, test = COLUMNS[payload["task"]], payload["significance"]
    rows = []
    for result in payload["results"]:
        p_value = result.get("p_value")
        marked = test["of"] if test is not None and p_value is not None and p_value < test["level"] else None
        cells = [
            f"{result['scores'][name]:{form}}{'*' if name == marked else ''}"
            for name, (_, form) in columns.items()
        ]
        rows.append([result["checkpoint"], *cells])
    data = payload["data"]
    title = f"{payload['task']}, {', '.join(data['files'])}, {data['texts']:,} texts"
    return console.table(title, ["checkpoint", *(title for title, _ in columns.values())], rows)
