"""Where the command line prints: results to stdout, everything else to stderr; of several processes the first alone."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from prunecli import processes
from prunecli.progress import Progress, silent
from prunecli.tensors.quantities import bytes_text as bytes_text  # of every table

if TYPE_CHECKING:
    from rich.console import Console

    from prunecli.options import Options

REPORT_EVERY_S = 10.0
"""Seconds between the plain progress lines of an output that is not a terminal."""

DUMB = ("dumb", "unknown")
"""Terminals that cannot write over a line, on which rich draws no bar."""

LONGEST_LINE = 1000
"""Characters of a message's line; the rest is left out."""

NO_TERMINAL_WIDTH = 160
"""Columns of a table in a file or a pipe, where COLUMNS does not say them."""


def plain(text: str) -> str:
    """Lines that a terminal shows as they are: values of damaged files may be endless, or hold control characters."""
    lines = text.split("\n")
    return printable(
        "\n".join(f"{line[:LONGEST_LINE]}…" if len(line) > LONGEST_LINE else line for line in lines)
    )


def printable(text: str) -> str:
    """Return `text` with its control characters, which could steer a terminal, written as escapes."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text
    )


_hushed: ContextVar[bool] = ContextVar("hushed", default=False)


@contextmanager
def hushed(quiet: bool) -> Iterator[None]:
    """With `quiet`, notes are not shown."""
    before = _hushed.set(quiet)
    try:
        yield
    finally:
        _hushed.reset(before)


_spelling: ContextVar[Callable[[str], str]] = ContextVar("spelling", default=str)


@contextmanager
def speaking_of(options: type[Options]) -> Iterator[None]:
    """Lines show the fields of these options as the command line spells them."""
    before = _spelling.set(options.as_typed)
    try:
        yield
    finally:
        _spelling.reset(before)


def is_hushed() -> bool:
    """Whether notes are not shown."""
    return _hushed.get()


def note(text: str) -> None:
    """One plain line on stderr, but for --quiet: what was taken by default, what was written."""
    if not _hushed.get():
        warn(text)


def warn(text: str) -> None:
    """One plain line on stderr, with --quiet too."""
    if processes.rank() == 0:
        say(text)


def say(text: str) -> None:
    """One plain line on stderr, of whichever process."""
    print(wrapped(plain(_spelling.get()(text)), sys.stderr), file=sys.stderr, flush=True)  # noqa: T201


def out(text: str) -> None:
    """Print plain text on stdout, wrapped at the width of a terminal."""
    _print(wrapped(printable(text), sys.stdout))


def verbatim(text: str) -> None:
    """Print plain text on stdout whose lines stay whole: commands and files, to be copied."""
    _print(printable(text))


def wrapped(text: str, stream: TextIO) -> str:
    """Return `text` with its lines wrapped between words, where the width of `stream` is known; indents stay."""
    columns = _columns(stream)
    if columns is None:
        return text
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip(" ")))
        parts = textwrap.wrap(
            line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += parts if len(line) > columns else [line]
    return "\n".join(lines)


def _print(text: str) -> None:
    if processes.rank() == 0:
        print(text, flush=True)  # noqa: T201


def print_json(payload: Mapping[str, Any]) -> None:
    """The result as JSON on stdout."""
    _print(json.dumps(payload, indent=1, ensure_ascii=False, allow_nan=False))


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    text_columns: int = 1,
    keys: int = 1,
) -> None:
    """Print a table on stdout, or several below one another where the output is too narrow for one.

    Args:
        text_columns: so many of the first hold text and names, aligned left; the others values, aligned right.
        keys: so many of the first are in each of several.
    """
    if processes.rank() != 0:
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = _stdout()
    with console.capture() as captured:
        if title:
            console.print(Text(plain(title), style="bold"))  # a table would wrap its title at its own width
        printed = [[*map(plain, row)] for row in rows]
        for block in blocks([*map(plain, columns)], printed, width(), text_columns, keys):
            part = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for index, column in enumerate(block.columns):
                is_text = index < text_columns
                justify: Any = "left" if is_text else "right"
                part.add_column(column, justify=justify, overflow="fold", no_wrap=not is_text)
            for row in block.rows:
                part.add_row(*row)
            console.print(part)
    text = captured.get().removesuffix("\n")
    _print(text if console.is_terminal else "\n".join(line.rstrip() for line in text.split("\n")))


def width() -> int:
    """Columns of the output that `table` prints on."""
    return _stdout().width


def _stdout() -> Console:
    from rich.console import Console

    # No markup and no emoji: names of checkpoints and languages may hold brackets and colons.
    columns = _columns(sys.stdout) or NO_TERMINAL_WIDTH
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=columns, height=25)


def _columns(stream: TextIO) -> int | None:
    """Columns that COLUMNS asks for, or those of a terminal; None for a file or a pipe."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return (os.get_terminal_size(stream.fileno()).columns or 80) if stream.isatty() else None


def progress(quiet: bool = False) -> Progress:
    """Bars with rate and time left in a terminal, a plain line now and then elsewhere, nothing with `quiet`."""
    if quiet or processes.rank() != 0:
        return silent
    return _bars if _has_bars() else _lines


def lines(quiet: bool = False) -> Progress:
    """`progress` of work that draws its own bars in a terminal."""
    return silent if quiet or processes.rank() != 0 or _has_bars() else _lines


def _has_bars() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") not in DUMB


@contextmanager
def _bars(
    description: str, total: float | None = None, unit: str = "steps"
) -> Iterator[Callable[[float], None]]:
    from rich.console import Console
    from rich.constrain import Constrain
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column
    from rich.text import Text

    terminal = Console(file=sys.stderr)

    class Bars(Progress):
        def get_renderables(self) -> Iterator[Constrain]:
            # The last two columns are for the ^C that a terminal echoes: a line that wraps is not wiped out.
            for table in super().get_renderables():
                yield Constrain(table, terminal.width - 2)

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            if not speed:
                return Text()
            return Text(f"{bytes_text(speed)}/s" if unit == "bytes" else f"{speed:,.1f}/s")

    # On a narrow terminal the bar alone shrinks.
    whole = Column(no_wrap=True)
    amount = (
        (DownloadColumn(binary_units=True, table_column=whole),)
        if unit == "bytes"
        else (MofNCompleteColumn(table_column=whole), TextColumn(unit, markup=False))
    )
    with Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        *amount,
        Rate(table_column=whole),
        TimeRemainingColumn(table_column=whole),
        console=terminal,
        transient=True,
    ) as bars:
        task = bars.add_task(description, total=total)
        yield lambda step: bars.advance(task, step)


@contextmanager
def _lines(
    description: str, total: float | None = None, unit: str = "steps"
) -> Iterator[Callable[[float], None]]:
    start = reported = time.monotonic()
    done = 0.0

    def advance(step: float) -> None:
        nonlocal done, reported
        done += step
        now = time.monotonic()
        if now - reported >= REPORT_EVERY_S:
            reported = now
            rate = done / (now - start)
            of = "" if total is None else f" of {total:,.0f}"
            left = "" if total is None or not 0 < done < total else f", {(total - done) / rate:,.0f} s left"
            note(f"{description}: {done:,.0f}{of} {unit}, {rate:,.1f} a second{left}")

    yield advance


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
