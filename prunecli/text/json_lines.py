"""JSON lines of texts and chats: an object a line, with `text` or with `messages`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prunecli.errors import DataError
from prunecli.tensors.json_files import parsed
from prunecli.text.lines import PACKED, read_lines

JSON_LINES = (".jsonl", ".ndjson")
"""Endings of the names of such files, which `.gz` may follow."""
_REMEDY = 'A line is {"text": "…"}, or {"messages": [{"role": "user", "content": "…"}, …]}.'

Chat = tuple[dict[str, object], ...]
"""Messages: {"role": "user", "content": "…"}, and what else the tokenizer's chat template reads."""


def is_json_lines(path: Path) -> bool:
    """Whether a file is one by its name."""
    return Path(path.name.removesuffix(PACKED)).suffix in JSON_LINES


def read_json_lines(path: Path) -> tuple[str | Chat, ...]:
    """The text or chat of every line that is not blank.

    Raises:
        DataError: no such file, or one that is not as it should be (with the line).
    """
    documents = []
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}, line {number:,}"
        if line.strip():
            document = document_of(parsed_line(where, line, _REMEDY))
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
    if text is None and isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return tuple(messages)
    return None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
