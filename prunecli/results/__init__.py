"""The JSON files that prunecli writes: a class each, which writes, reads and checks it, and gives its tables.

`read("evaluation.json").frame()` is a pandas frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prunecli.results.document import Document


def read(path: Path | str) -> Document:
    """Read evaluation.json, latency.json, similarity.json, languages.json, texts.json, heads.json,
    head-comparison.json, gates.json, prunecli_decisions.json, a training's log, or what `--json` of `inspect`,
    `explain` or a rewriting command printed.

    Returns:
        A value of the format's class: `Evaluation`, `Latency`, `Similarity`, `Languages`, `Texts`,
        `Scores`, `HeadComparison`, `GateStatistics`, `Decisions`, `Explanation`, `Training`, `Inspection`, or one
        of those in `results.rewriting`.

    Raises:
        DataError: missing, cut short, not a result of this version, or with fields that no run writes.
        StatisticsError: invalid fields of heads.json or gates.json.
        CheckpointError: invalid fields of prunecli_decisions.json.
    """
    from prunecli.errors import DataError
    from prunecli.tensors.json_files import read_json

    path = Path(path)
    payload = read_json(path, error=DataError)
    format_ = payload.get("format") if isinstance(payload, dict) else None
    if not isinstance(format_, str):
        raise DataError(
            f"{path}: no result of prunecli's", "Give a JSON file that one of its commands wrote."
        )
    if (kind := kind_of(format_)) is None:
        raise DataError(
            f'{path}: files of the format "{format_}" hold no tables', f"Those are {', '.join(formats())}."
        )
    return kind.from_json(payload, path)


def kind_of(format_: str) -> type[Document] | None:
    """The class that reads files of a format, of whichever version."""
    return formats().get(format_.rpartition("/")[0])


def formats() -> Mapping[str, type[Document]]:
    """Format without its version -> the class that reads and writes it, of every module of this package."""
    from prunecli.results.document import Document

    found: dict[str, type[Document]] = {}
    for module in iter_modules(__path__):
        for kind in vars(import_module(f"{__name__}.{module.name}")).values():
            if isinstance(kind, type) and issubclass(kind, Document) and "FORMAT" in vars(kind):
                for known in (kind.FORMAT, *kind.UPGRADES):
                    found[known.rpartition("/")[0]] = kind
    return found
