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
    read = _json_line if numbered[0][1].lstrip().startswith("{") else _tab_line
    rows = [(number, *read(f"{path}, line {number:,}", line)) for number, line in numbered]
    paired = rows[0][3] is not None
    for number, _, _, second in rows:
        if (second is not None) != paired:
            have, first = ("no second text", "one") if paired else ("a second text", "none")
            raise DataError(
                f"{path}, line {number:,}: {have}, where line {rows[0][0]:,} has {first}", _REMEDY
            )
    return LabelledText(
        path,
        labels=tuple(row[1] for row in rows),
        texts=tuple(row[2] for row in rows),
        seconds=tuple(row[3] or "" for row in rows) if paired else None,
        lines=tuple(row[0] for row in rows),
    )


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


def _tab_line(where: str, line: str) -> tuple[str, str, str | None]:
    fields = line.split("\t")
    if len(fields) == 1:
        raise DataError(f"{where}: no label (the line holds no tab)", _REMEDY)
    if len(fields) > 3:
        raise DataError(f"{where}: {len(fields)} fields, where 2 or 3 are expected", _REMEDY)
    return _checked(where, fields[0], fields[1], fields[2] if len(fields) == 3 else None)


def _json_line(where: str, line: str) -> tuple[str, str, str | None]:
    row = parsed_line(where, line, _REMEDY)
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object", _REMEDY)
    label = row.get("label")
    if isinstance(label, int) and not isinstance(label, bool):
        label = str(label)
    return _checked(where, label, row.get("text"), row.get("text_b"))


def _checked(where: str, label: Any, text: Any, second: Any) -> tuple[str, str, str | None]:
    if not isinstance(label, str) or not label.strip():
        raise DataError(f"{where}: no label", _REMEDY)
    for value in (text, "-" if second is None else second):
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{where}: no text", _REMEDY)
    return label.strip(), text.strip(), None if second is None else second.strip()
