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
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from prunecli import processes
from prunecli.progress import Progress, silent
from prunecli.tensors.quantities import bytes_text as bytes_text  # of every table

if TYPE_CHECKING:
    from rich.console import Console

    from prunecli.options import Options
    from prunecli.results.document import Shown

REPORT_EVERY_S = 10.0
"""Seconds between the plain progress lines of an output that is not a terminal."""

DUMB = ("dumb", "unknown")
"""Terminals that cannot write over a line, on which rich draws no bar."""

LONGEST_LINE = 1000
"""Characters of a message's line; the rest is left out."""

NOTHING = "-"
"""A cell of a table without a value."""

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


def listed(names: Sequence[str], last: str) -> str:
    """Return "a, b and c", with the word `last` before the last name."""
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


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


def show(*tables: Shown) -> None:
    """Print tables on stdout, each as several below one another if the output is too narrow for one."""
    for one in tables:
        _show(one)


def table(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str] | None = None,
    text_columns: int = 1,
    keys: int = 1,
) -> None:
    """Print one table; see `Shown.of`. Without `columns`, the rows hold the texts of the cells."""
    from prunecli.results.document import Shown

    made = Shown(title, rows) if columns is None else Shown.of(title, rows, columns)
    _show(replace(made, text_columns=text_columns, keys=keys))


def _show(shown: Shown) -> None:
    if processes.rank() != 0 or not shown.rows:
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = _stdout()
    cells = ([row.get(name) for row in shown.rows] for name in shown.columns)
    columns = {
        name: [NOTHING if text is None else plain(text) for text in own]
        for name, own in zip(shown.columns, cells, strict=True)
    }
    texts = shown.texts
    with console.capture() as captured:
        if shown.title:
            console.print(Text(plain(shown.title), style="bold"))  # a table wraps a title at its own width
        for widths in blocks(columns, width(), texts, max(shown.keys, texts)):
            part = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for name, size in widths.items():
                is_text = name in shown.columns[:texts]
                justify: Any = "left" if is_text else "right"
                part.add_column(plain(name), justify=justify, overflow="fold", width=size)
            for row in zip(*(columns[name] for name in widths), strict=True):
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
SHORTEST_NAME, LONGEST_NAME = 12, 20
"""Letters that a name keeps in a single table before columns go into a second one, and in several tables."""


def blocks(columns: dict[str, list[str]], width: int, texts: int, keys: int) -> list[dict[str, int]]:
    """Widths of the columns of each table that shows some of the columns; shortens names in `columns` if they must be.

    Args:
        columns: heading -> cells.
        width: number of letters of a line.
        texts: number of the first columns, which hold text that wraps at spaces, and names that may be shortened.
        keys: number of the first columns, which every table has.
    """
    names = list(columns)
    sizes = {
        name: max(map(_longest if name in names[:texts] else len, cells)) for name, cells in columns.items()
    }

    def least(name: str, longest: int) -> int:
        """Width of a column whose names have at most `longest` letters."""
        size = min(sizes[name], longest) if name in names[:texts] else sizes[name]
        return max(size, _longest(name))

    def taken(chosen: Sequence[str], longest: int) -> int:
        return EDGES + GAP * (len(chosen) - 1) + sum(least(name, longest) for name in chosen)

    widest = max(names[keys:], key=lambda name: least(name, width), default=names[0])
    one, several = range(width, SHORTEST_NAME - 1, -1), range(LONGEST_NAME, 1, -1)
    whole = (longest for longest in one if taken(names, longest) <= width)
    parts = (longest for longest in several if taken([*names[:keys], widest], longest) <= width)
    longest = next(whole, None) or next(parts, 1)
    groups = [names[:keys]]
    for name in names[keys:]:
        if len(groups[-1]) > keys and taken([*groups[-1], name], longest) > width:
            groups.append(names[:keys])
        groups[-1].append(name)
    for name in names[:texts]:
        columns[name] = shortened(columns[name], longest)
    made = []
    for group in groups:
        spare, widths = width - taken(group, longest), {}
        for name in group:
            widths[name] = least(name, longest)
            more = min(max(map(len, (*name.split("\n"), *columns[name]))) - widths[name], spare)
            widths[name], spare = widths[name] + max(more, 0), spare - max(more, 0)
        made.append(widths)
    return made


def shortened(texts: Sequence[str], longest: int) -> list[str]:
    """Texts with words of at most `longest` letters, the middle left out; different ones stay different if they can."""
    middle = longest // 2
    for head in sorted(range(longest), key=lambda head: abs(head - middle)):
        shorter = [" ".join(_cut(word, longest, head) for word in text.split(" ")) for text in texts]
        if len(set(shorter)) == len(set(texts)):
            return shorter
    return [" ".join(_cut(word, longest, middle) for word in text.split(" ")) for text in texts]


def _cut(word: str, longest: int, head: int) -> str:
    return word if len(word) <= longest else f"{word[:head]}…{word[len(word) - (longest - 1 - head) :]}"


def _longest(text: str) -> int:
    return max(map(len, text.split()), default=0)
