"""Text files of every kind: lines, JSON lines of texts and chats, data sets of the hub, files that have a name."""

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from prunecli.errors import DataError, PruneError, UsageError, reason_of
from prunecli.tensors.json_files import parsed, read_bytes

PACKED = ".gz"
"""Ending of the names of files that are unpacked as they are read."""
SHOWN = 12
"""Names that a message lists at most."""
_ONE_A_LINE = "Name a file of text, one entry per line."


def read_lines(path: Path) -> tuple[str, ...]:
    r"""The lines of a UTF-8 file without their line ends (`\n` or `\r\n`) and without a byte order mark.

    A file whose name ends in `.gz` is unpacked.

    Raises:
        DataError: no such file, an empty one, a damaged one, a Git LFS pointer, or one that is not UTF-8 (with the
            line).
    """
    data = read_bytes(path, DataError, _ONE_A_LINE)
    try:
        if path.suffix == PACKED and data:
            data = gzip.decompress(data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: not a whole gzip file ({reason_of(error)})", "Copy the file again."
        ) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}, line {line:,}: not UTF-8 (byte 0x{data[error.start]:02x})", "Convert the file to UTF-8."
        ) from error
    if not text.strip():
        raise DataError(f"{path}: the file is empty", "Name a file with text.")
    # Not splitlines(), which would also cut at U+2028, form feeds and the like, inside a sentence.
    return tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n"))


def lines_sha256(lines: Iterable[str]) -> str:
    """A hash of lines in their order."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def near_names(name: str, known: Iterable[str], label: str = "Known") -> str:
    """Hint about an unknown `name`: the nearest of `known`, or, after `label`, a few of them."""
    names = sorted(set(known))
    near = get_close_matches(name, names, n=3, cutoff=0.8)
    near = near or [other for other in names if name and other.startswith(name)][:3]
    if near:
        return f"Did you mean {' or '.join(near)}?"
    shown = ", ".join(names[:SHOWN]) + (f", … ({len(names)} in all)" if len(names) > SHOWN else "")
    return f"{label}: {shown}." if names else f"{label}: none."


def require_count(count: int | None, present: int, what: str, source: str, holds: str = "it holds") -> None:
    """Refuse to take the first `count` of what is fewer; None asks for all.

    Raises:
        DataError: there are fewer.
    """
    if count is not None and count > present:
        raise DataError(
            f"{source}: {count:,} {what} were asked for, {holds} {present:,}",
            f"Ask for at most {present:,}.",
        )


JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Endings of the names of such files, which `.gz` may follow."""
_REMEDY = 'A line is {"text": "…"}, or {"messages": [{"role": "user", "content": "…"}, …]}.'

Chat = tuple[dict[str, object], ...]
"""Messages: {"role": "user", "content": "…"}, and what else the tokenizer's chat template reads."""


def is_json_lines(path: Path) -> bool:
    """Whether a file is one by its name."""
    return Path(path.name.removesuffix(PACKED)).suffix in JSON_LINES


def read_json_lines(path: Path) -> tuple[str | Chat, ...]:
    """The text or chat of every line that is not blank, or of every entry of a list.

    Raises:
        DataError: no such file, or one that is not as it should be (with the line).
    """
    lines = read_lines(path)
    is_list = lines[0].startswith("[")  # a line is an object
    rows = parsed_line(str(path), "\n".join(lines), _REMEDY) if is_list else lines
    documents = []
    for number, row in enumerate(rows, start=1):
        where = f"{path}, {'entry' if is_list else 'line'} {number:,}"
        if is_list or row.strip():
            document = document_of(row if is_list else parsed_line(where, row, _REMEDY))
            if document is None:
                raise DataError(f'{where}: neither a "text" nor a chat of "messages"', _REMEDY)
            documents.append(document)
    return tuple(documents)


def parsed_line(where: str, line: str, remedy: str) -> Any:
    """The value of a line of JSON.

    Raises:
        DataError: it holds none; `where` and `remedy` are those of the message.
    """
    try:
        return parsed(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error})", remedy) from error


def document_of(row: Any) -> str | Chat | None:
    """The `text` or the chat of `messages` that a row holds; None: neither, or both."""
    text, messages = (row.get("text"), row.get("messages")) if isinstance(row, dict) else (None, None)
    if messages is None and isinstance(text, str):
        return text
    is_chat = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one for one in messages
    )
    return tuple(messages) if is_chat and messages and text is None else None


_SCHEME = re.compile(r"hf:/+")
_PART = r"[\w.-]+"
_HUB_FORM = re.compile(
    rf"hf:/+(?P<name>{_PART}/{_PART})(?:/(?P<config>{_PART}))?"
    r"(?::(?P<split>[\w.+-]+)(?:\[:(?P<count>\d+)\])?(?::(?P<column>[^:]+))?)?"
)
_HUB_REMEDY = (
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
    """Parse `hf://…`; the default split is `train`.

    Raises:
        UsageError: it is of another form.
    """
    match = _HUB_FORM.fullmatch(str(path))
    if match is None:
        raise UsageError(f"{path}: no data set of the hub is named so", _HUB_REMEDY)
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
    from prunecli.model.conversion import require_package

    datasets = require_package("datasets>=3", f"{data}: reading a data set of the hub")
    documents = []
    left = None if max_tokens is None else CHARACTERS * max_tokens
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
            documents.append(document)
            contents = [document] if isinstance(document, str) else [str(one["content"]) for one in document]
            if left is not None and (left := left - sum(map(len, contents))) <= 0:
                break
    except PruneError:
        raise
    except Exception as error:  # whatever a server, a format or a name of a split runs into there
        raise DataError(
            f"{data}: cannot be read ({reason_of(error)})", "Check its name, split and config."
        ) from error
    if not documents:
        raise DataError(f"{data}: no rows", "Name another split.")
    return tuple(documents)


_NAMED_FORM = "Write `text=FILE`, or `text=NAME=FILE`."


@dataclass(frozen=True)
class TextFile:
    """A file of text, or a data set of the hub.

    Attributes:
        name: that was given to it; several files may have one and are one text then. None: none was given.
    """

    path: Path
    name: str | None = None


def parse_text_file(value: str) -> TextFile:
    """`FILE` or `NAME=FILE`; where a file is called like the whole of it, it is that file.

    What stands before the first `=` is no name where there is a `/` in it. A file may be `hf://…`, a data set.

    Raises:
        UsageError: an empty name or file, a name with a comma, which separates names elsewhere, or a data set that is
            named in another form.
    """
    name, equals, file = value.partition("=")
    for data in filter(is_hub_data, (value, file)):
        parse_hub_data(data)
    if not equals or "/" in name or Path(value).is_file():
        return TextFile(Path(value))
    name = name.strip()
    if not name or not file:
        raise UsageError(f"`text={value}`: no {'file' if name else 'name'}", _NAMED_FORM)
    if "," in name:
        raise UsageError(f"`text={value}`: a comma in the name {name!r}", "Choose a name without one.")
    return TextFile(Path(file), name)


def names_of(files: Sequence[TextFile]) -> tuple[str, ...]:
    """The name of each file: the one that was given, else the file's own without its endings, or the data set's.

    Two files without names whose own are the same, or one with the name that another was given, have their whole path.
    """
    own = [
        parse_hub_data(path).name.rpartition("/")[2]
        if is_hub_data(path)
        else path.name.lstrip(".").split(".")[0] or path.name
        for path in (file.path for file in files)
    ]
    taken = [one if file.name is None else file.name for one, file in zip(own, files, strict=True)]
    return tuple(
        str(file.path) if file.name is None and taken.count(name) > 1 else name
        for name, file in zip(taken, files, strict=True)
    )
