"""Labelled text: a class and a sentence, or a pair of sentences, on every line."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prunecli.errors import DataError
from prunecli.text.files import SHOWN, parsed_line, read_lines, require_count

_REMEDY = (
    "A line is label<TAB>text, label<TAB>text<TAB>second text, or JSON with the keys label, text, text_b."
)


@dataclass(frozen=True)
class LabelledText:
    """The examples of one file.

    Attributes:
        path: the file.
        labels: of each example, as written.
        texts: of each example.
        seconds: the second text of each example, or None where examples have one text.
        lines: the line of the file that each example is on, from 1.
    """

    path: Path
    labels: tuple[str, ...]
    texts: tuple[str, ...]
    seconds: tuple[str, ...] | None
    lines: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def files(self) -> tuple[Path, ...]:
        """The file alone; as in `PlainText`."""
        return (self.path,)

    @property
    def sha256(self) -> str:
        """A hash of the examples."""
        rows = [self.labels, self.texts, *([] if self.seconds is None else [self.seconds])]
        return hashlib.sha256("\n".join("\n".join(row) for row in rows).encode()).hexdigest()

    def first(self, count: int | None) -> LabelledText:
        """The first `count` examples; all of them where it is None.

        Raises:
            DataError: there are fewer.
        """
        require_count(count, len(self), "examples", str(self.path))
        return replace(
            self,
            labels=self.labels[:count],
            texts=self.texts[:count],
            seconds=None if self.seconds is None else self.seconds[:count],
            lines=self.lines[:count],
        )


def read_labelled(path: Path | str) -> LabelledText:
    """Read `label<TAB>text` or `label<TAB>text<TAB>second text` lines, or JSON lines (`label`, `text`, `text_b`).

    It is JSON lines where the first line that is not blank begins with `{`. Blank lines are skipped.

    Raises:
        DataError: no such file, an empty one or one that is not UTF-8; a line without a label or a text, or with a
            second text where others have none.
    """
    path = Path(path)
    numbered = [(number, line) for number, line in enumerate(read_lines(path), start=1) if line.strip()]
    is_json = numbered[0][1].lstrip().startswith("{")
    rows = []
    for number, line in numbered:
        where = f"{path}, line {number:,}"
        row = _json_fields(where, line) if is_json else line.split("\t")
        if len(row) not in (2, 3):
            what = (
                "no label (the line holds no tab)"
                if len(row) == 1
                else f"{len(row)} fields, where 2 or 3 are expected"
            )
            raise DataError(f"{where}: {what}", _REMEDY)
        for what, value in zip(("label", "text", "text"), row, strict=False):
            if not isinstance(value, str) or not value.strip():
                raise DataError(f"{where}: no {what}", _REMEDY)
        rows.append([value.strip() for value in row])
        if len(row) != len(rows[0]):
            have, first = ("no second text", "one") if len(row) == 2 else ("a second text", "none")
            raise DataError(f"{where}: {have}, where line {numbered[0][0]:,} has {first}", _REMEDY)
    labels, texts, *seconds = zip(*rows, strict=True)
    lines = tuple(number for number, _ in numbered)
    return LabelledText(path, labels, texts, seconds[0] if seconds else None, lines)


def _json_fields(where: str, line: str) -> list[Any]:
    row = parsed_line(where, line, _REMEDY)
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object", _REMEDY)
    label, second = row.get("label"), row.get("text_b")
    if isinstance(label, int) and not isinstance(label, bool):
        label = str(label)
    return [label, row.get("text"), *([] if second is None else [second])]


def label_ids(text: LabelledText, names: Mapping[int, str]) -> list[int]:
    """The class of each example: by a model's name for it, whatever its case, or by number.

    Args:
        names: class -> name, config.json's `id2label`.

    Raises:
        DataError: a label that is neither a name nor a number of a class.
    """
    known = {str(name): int(number) for number, name in names.items()}
    known |= {name.lower(): number for name, number in known.items() if name.lower() not in known}
    known |= {str(number): int(number) for number in names if str(number) not in known}
    ids = []
    for label, line in zip(text.labels, text.lines, strict=True):
        number = known.get(label, known.get(label.lower()))
        if number is None:
            shown = [*map(str, list(names.values())[:SHOWN]), *(["…"] if len(names) > SHOWN else [])]
            raise DataError(
                f"{text.path}, line {line:,}: the model knows no label {label!r}",
                f"It knows: {', '.join(shown)}; or their numbers, 0 to {len(names) - 1}.",
            )
        ids.append(number)
    return ids
