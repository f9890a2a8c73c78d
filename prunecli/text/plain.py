"""Plain text: files of one text per line, or each file one text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prunecli.errors import DataError, UsageError
from prunecli.text.hub_data import is_hub_data, read_hub_data
from prunecli.text.json_lines import Chat, is_json_lines, read_json_lines
from prunecli.text.lines import read_lines, require_count


@dataclass(frozen=True)
class PlainText:
    """Texts, in the order of the files and of their lines.

    Attributes:
        files: where they are from.
        texts: without line ends at their ends; none is blank.
        names: of each text, the one that its file was given; empty: none was.
    """

    files: tuple[Path, ...]
    texts: tuple[str, ...]
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def sha256(self) -> str:
        """A hash of the texts."""
        return hashlib.sha256("\n".join(self.texts).encode()).hexdigest()

    @property
    def by_name(self) -> dict[str, list[int]]:
        """Name -> the numbers of its texts; empty where there are no names."""
        found: dict[str, list[int]] = {}
        for number, name in enumerate(self.names):
            found.setdefault(name, []).append(number)
        return found

    def first(self, count: int | None) -> PlainText:
        """The first `count` texts, of each name where there are names; all of them where it is None.

        Raises:
            DataError: there are fewer.
        """
        if not self.names:
            require_count(count, len(self), "texts", ", ".join(map(str, self.files)), "there are")
            return PlainText(self.files, self.texts[:count])
        for name, numbers in self.by_name.items():
            require_count(count, len(numbers), "texts", name, "there are")
        kept = sorted(number for numbers in self.by_name.values() for number in numbers[:count])
        return PlainText(self.files, tuple(self.texts[n] for n in kept), tuple(self.names[n] for n in kept))


def read_plain(
    files: Sequence[Path | str], *, whole_files: bool = False, names: Sequence[str] = ()
) -> PlainText:
    r"""Read UTF-8 text; blank lines are skipped, a byte order mark and the `\r` of line ends are left out.

    A file called `.jsonl` holds an object a line, whose `text` is one; `hf://…` is a data set of the hub.

    Args:
        files: in the order in which they are to be read.
        whole_files: each file is one text, its line ends and blank lines included; else each line is one.
        names: of each file; empty: they have none.

    Raises:
        UsageError: no file is given, or a data set without a bound.
        PruneError: a data set, and `datasets` is not installed.
        DataError: no such file, an empty one, or one that is not UTF-8 (with the line), or a chat.
    """
    if not files:
        raise UsageError("no file of text was given", "Name one or more with --text.")
    paths = tuple(Path(file) for file in files)
    texts: list[str] = []
    owners: list[str] = []
    for number, path in enumerate(paths):
        if is_hub_data(path):
            texts += _texts_alone(path, read_hub_data(path))
        elif is_json_lines(path):
            texts += _texts_alone(path, read_json_lines(path))
        else:
            lines = read_lines(path)
            texts += ["\n".join(lines)] if whole_files else [line for line in lines if line.strip()]
        if names:
            owners += [names[number]] * (len(texts) - len(owners))
    return PlainText(paths, tuple(texts), tuple(owners))


def _texts_alone(path: Path, documents: Sequence[str | Chat]) -> list[str]:
    texts = [document for document in documents if isinstance(document, str) and document.strip()]
    if any(not isinstance(document, str) for document in documents) or not texts:
        held = "chats" if documents else "no text"
        raise DataError(f"{path}: holds {held}; texts are needed here", 'A line is {"text": "…"}.')
    return texts
