"""Data sets of the hub in the place of a file of text, by the package `datasets` where it is installed.

`hf://ORG/NAME[/CONFIG]:SPLIT[[:N]][:COLUMN]`, as in `hf://org/chats:train[:1000]:messages`: rows are streamed, the
first N of them. A `Path` keeps one of the two slashes, which is how such a name goes wherever files do.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from prunecli.errors import DataError, PruneError, UsageError, reason_of
from prunecli.text.json_lines import Chat, document_of

_SCHEME = re.compile(r"hf:/+")
_PART = r"[\w.-]+"
_FORM = re.compile(
    rf"hf:/+(?P<name>{_PART}/{_PART})(?:/(?P<config>{_PART}))?"
    r"(?::(?P<split>[\w.+-]+)(?:\[:(?P<count>\d+)\])?(?::(?P<column>[^:]+))?)?"
)
_REMEDY = (
    "Write hf://ORG/NAME:SPLIT[:1000]:COLUMN; a config's name goes behind the name, hf://ORG/NAME/CONFIG."
)
CHARACTERS = 16
"""That are read for each token asked for: few texts have so long tokens."""


@dataclass(frozen=True)
class HubData:
    """Rows of a data set.

    Attributes:
        name: `org/name`.
        config: of the data set's; None: its only one.
        count: rows; None: all.
        column: of the text or chat; None: `text` or `messages`.
    """

    name: str
    config: str | None
    split: str
    count: int | None
    column: str | None

    def __str__(self) -> str:
        whole = self.name if self.config is None else f"{self.name}/{self.config}"
        rows = "" if self.count is None else f"[:{self.count}]"
        return f"hf://{whole}:{self.split}{rows}" + (f":{self.column}" if self.column else "")


def is_hub_data(path: Path | str) -> bool:
    """Whether a data set is meant."""
    return _SCHEME.match(str(path)) is not None


def parse_hub_data(path: Path | str) -> HubData:
    """What is meant by `hf://…`; without a split the one called `train`.

    Raises:
        UsageError: it is of another form.
    """
    match = _FORM.fullmatch(str(path))
    if match is None:
        raise UsageError(f"{path}: no data set of the hub is named so", _REMEDY)
    count = match["count"]
    return HubData(
        match["name"],
        match["config"],
        match["split"] or "train",
        None if count is None else int(count),
        match["column"],
    )


def read_hub_data(path: Path | str, max_tokens: int | None = None) -> tuple[str | Chat, ...]:
    """The text or chat of each row.

    Args:
        max_tokens: that are needed; rows with CHARACTERS times as many characters are read at most, and the one that
            goes beyond.

    Raises:
        UsageError: another form, or no bound to how much is read.
        PruneError: `datasets` is not installed.
        DataError: no such data set, split or column, or one that cannot be had.
    """
    data = parse_hub_data(path)
    if data.count is None and max_tokens is None:
        raise UsageError(
            f"{data}: nothing bounds how much of it is read",
            f"Name its first rows, hf://{data.name}:{data.split}[:1000].",
        )
    documents: list[str | Chat] = []
    left = None if max_tokens is None else CHARACTERS * max_tokens
    for document in _documents(data):
        documents.append(document)
        contents = [document] if isinstance(document, str) else [str(one["content"]) for one in document]
        if left is not None and (left := left - sum(map(len, contents))) <= 0:
            break
    if not documents:
        raise DataError(f"{data}: no rows", "Name another split.")
    return tuple(documents)


def _documents(data: HubData) -> Iterator[str | Chat]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise PruneError(
            f"{data}: data sets of the hub are read by the package datasets, which is not installed.",
            "Install it: pip install datasets. Or give a file.",
        ) from error
    try:
        rows = datasets.load_dataset(data.name, data.config, split=data.split, streaming=True)
        for number, row in enumerate(islice(rows, data.count), start=1):
            where, columns = f"{data}, row {number:,}", ", ".join(row)
            if data.column is not None:
                if data.column not in row:
                    raise DataError(f"{where}: has no column {data.column!r}", f"Its columns: {columns}.")
                value = row[data.column]
                row = {"text" if isinstance(value, str) else "messages": value}
            document = document_of(row)
            if document is None:
                raise DataError(
                    f"{where}: neither text nor a chat",
                    f"Name a column behind the split; its columns: {columns}. A chat is a list of role and content.",
                )
            if not isinstance(document, str):  # a table has every key in each message
                document = tuple(
                    {key: value for key, value in message.items() if value is not None or key == "content"}
                    for message in document
                )
            yield document
    except PruneError:
        raise
    except Exception as error:  # whatever a server, a format or a name of a split runs into there
        raise DataError(
            f"{data}: cannot be read ({reason_of(error)})", "Check its name, split and config."
        ) from error
