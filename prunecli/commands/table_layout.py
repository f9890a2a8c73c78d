"""How a table fits a narrow terminal: headings wrap, names are shortened in the middle, columns go into several blocks.

Values are never broken.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

GAP = 3
"""Spaces between two columns."""
EDGES = 2
"""Spaces before the first column and after the last."""
SHORTEST_NAME = 12
"""Letters that a shortened name keeps before columns go into a second block."""
LONGEST_NAME = 20
"""Letters of a name that every block repeats."""


@dataclass(frozen=True)
class Block:
    """Columns that stand side by side.

    Attributes:
        columns: their headings, of several lines where there is little room.
        rows: their cells.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def blocks(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, text_columns: int = 1, keys: int = 1
) -> list[Block]:
    """The table as it is where it fits `width`; else with less of its names, else in several blocks.

    Args:
        columns: headings.
        rows: a cell for each; missing ones are empty.
        text_columns: so many of the first hold text, which wraps at spaces, and names, which may be shortened.
        keys: so many of the first are repeated in every block.
    """
    filled = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
    cells = [[row[index] for row in filled] for index in range(len(columns))]
    least = [
        max((_longest(text) if index < text_columns else len(text) for text in column), default=0)
        for index, column in enumerate(cells)
    ]
    least = [max(size, _longest(name)) for size, name in zip(least, columns, strict=True)]
    room = width - _taken(least[text_columns:], len(columns))
    groups = [list(range(len(columns)))]
    if sum(least[:text_columns]) > room:
        if room < SHORTEST_NAME * text_columns:
            repeated = max(keys, text_columns)
            widest = [*least[text_columns:repeated], max(least[repeated:], default=0)]
            spare = width - _taken(widest, repeated + 1)
            room = max(
                min(sum(min(size, LONGEST_NAME) for size in least[:text_columns]), spare), text_columns
            )
            groups = list(_packed(least, [*_shares(least[:text_columns], room)], width, keys))
        for index, share in enumerate(_shares(least[:text_columns], room)):
            cells[index] = shortened(cells[index], share)
    fitted = []
    for group in groups:
        names, own = [columns[index] for index in group], [cells[index] for index in group]
        fitted.append(Block(tuple(_headings(names, own, width)), tuple(zip(*own, strict=True))))
    return fitted


def shortened(texts: Sequence[str], longest: int) -> list[str]:
    """Texts with words of at most `longest` letters, the middle left out; different ones stay different if they can."""
    if max(map(_longest, texts), default=0) <= longest:
        return list(texts)
    kept = max(longest - 1, 1)
    middle = (kept + 1) // 2
    for head in sorted(range(kept + 1), key=lambda head: abs(head - middle)):
        shorter = [" ".join(_cut(word, longest, head) for word in text.split(" ")) for text in texts]
        if len(set(shorter)) == len(set(texts)):
            return shorter
    return [" ".join(_cut(word, longest, middle) for word in text.split(" ")) for text in texts]


def _cut(word: str, longest: int, head: int) -> str:
    if len(word) <= longest:
        return word
    tail = longest - 1 - head
    return f"{word[:head]}…{word[len(word) - tail :]}"


def _longest(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _taken(widths: Sequence[int], columns: int) -> int:
    """Of a line, beside the columns that are left out of `widths`."""
    return EDGES + GAP * (columns - 1) + sum(widths)


def _shares(least: Sequence[int], room: int) -> Iterator[int]:
    """What of `room` each column gets: those that need little what they need, the others alike."""
    rest, waiting = room, sorted(range(len(least)), key=least.__getitem__)
    given = dict.fromkeys(waiting, 0)
    for served, index in enumerate(waiting):
        given[index] = min(least[index], rest // (len(waiting) - served))
        rest -= given[index]
    yield from (given[index] for index in range(len(least)))


def _packed(least: Sequence[int], text: Sequence[int], width: int, keys: int) -> Iterator[list[int]]:
    """Numbers of the columns of each block, the first `keys` in all of them."""
    sizes = [*text, *least[len(text) :]]
    repeated = list(range(max(keys, len(text))))
    group = list(repeated)
    for index in range(len(repeated), len(sizes)):
        asked = [*group, index]
        if len(group) > len(repeated) and _taken([sizes[column] for column in asked], len(asked)) > width:
            yield group
            asked = [*repeated, index]
        group = asked
    yield group


def _headings(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[str]:
    """The columns' names, in several lines where there is too little room."""
    least = [
        max(map(len, (*name.split(), *texts)), default=0) for name, texts in zip(columns, cells, strict=True)
    ]
    named = list(columns)
    for index in sorted(range(len(columns)), key=lambda index: least[index] - len(columns[index])):
        lengths = (max(map(len, name.split("\n"))) for name in named)
        if _taken(list(map(max, zip(least, lengths, strict=True))), len(columns)) <= width:
            break
        named[index] = "\n".join(textwrap.wrap(columns[index], least[index]))
    return named
