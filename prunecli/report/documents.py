"""Result files: which are prunecli's, and what their readers make of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunecli.errors import DataError
from prunecli.results.reading import checked
from prunecli.results.schemas import SCHEMAS
from prunecli.tensors.documents import read_json

MOST_IN_LAYER = 65_536
GATES, HEADS = "prunecli.gates/1", "prunecli.heads/1"
SHOWN = tuple(name for name in SCHEMAS if name != "prunecli.inspect/1")
"""Formats that a report shows."""
_MARK = b'"prunecli.'
"""Stands near the beginning of every file that prunecli writes, as its format."""
_HEAD_BYTES = 4096
_OWN_NAMES = re.compile(
    r"(gates|heads|evaluation|latency|languages|similarity)\.json|.+\.finetune\.json", re.DOTALL
)


@dataclass(frozen=True)
class Document:
    """A result file.

    Attributes:
        name: its path below the directory.
        format: "prunecli.NAME/VERSION".
        content: what the file's reader made of it.
    """

    name: str
    format: str
    content: Any


def read_document(name: str, path: Path) -> Document | None:
    """The result in a file; None for a file of others, or one that no report shows.

    Raises:
        PruneError: one of prunecli's that is damaged.
    """
    head = _head(path)
    if _MARK not in head:
        if not _OWN_NAMES.fullmatch(path.name):
            return None
        read_json(path)  # an empty or cut file of this name is most likely one of prunecli's
        return None
    payload = read_json(path)
    format_ = payload.get("format") if isinstance(payload, dict) else None
    if not isinstance(format_, str) or not format_.startswith("prunecli."):
        return None
    known = {one.rpartition("/")[0]: one for one in SHOWN}.get(format_.rpartition("/")[0])
    if known is None:
        return None
    if format_ != known:
        read_json(path, known)  # raises: of another version
    return Document(name, known, _content(path, known, payload))


def _content(path: Path, format_: str, payload: Any) -> Any:
    """What the format's reader makes of the file."""
    if format_ == GATES:
        from prunecli.results.published import read_gates

        return read_gates(path)
    if format_ == HEADS:
        from prunecli.results.heads import read_scores

        scores = read_scores(path)
        refuse_many(path, 1 + max(head for heads in scores.heads.values() for head in heads))
        return scores
    return checked(path, format_, payload)


def refuse_many(path: Path, count: int) -> None:
    """Refuse a layer of so many experts or heads as no model has: their cells would fill the memory.

    Raises:
        DataError: more than `MOST_IN_LAYER`.
    """
    if count > MOST_IN_LAYER:
        raise DataError(
            f"{path}: {min(count, 10**18):,} experts or heads in a layer; at most {MOST_IN_LAYER:,} are shown"
        )


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return b""
