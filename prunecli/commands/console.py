"""Where the command line prints: results to stdout, everything else to stderr; of several processes the first alone."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

from prunecli import processes
from prunecli.progress import Advance, Progress, silent
from prunecli.tensors.quantities import bytes_text as bytes_text  # of every table

if TYPE_CHECKING:
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

Blocks = Iterator[Any]
"""Tables and lines that commands yield."""


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


_manner: ContextVar[tuple[bool, Callable[[str], str]]] = ContextVar("manner", default=(False, str))
"""Whether notes are not shown; how fields are spelled."""


@contextmanager
def speaking_of(options: type[Options], *, quiet: bool) -> Iterator[None]:
    """Lines show the fields of these options as the command line spells them; with `quiet`, notes are not shown."""
    before = _manner.set((quiet, options.as_typed))
    try:
        yield
    finally:
        _manner.reset(before)


def is_hushed() -> bool:
    """Whether --quiet was given: notes, progress and tables are not shown."""
    return _manner.get()[0]


def note(*lines: str) -> None:
    """Plain lines on stderr, but for --quiet: what was taken by default, what was written."""
    for line in () if is_hushed() else lines:
        warn(line)


def warn(text: str) -> None:
    """One plain line on stderr, with --quiet too."""
    if processes.rank() == 0:
        say(text)


def say(text: str) -> None:
    """One plain line on stderr, of whichever process."""
    print(wrapped(plain(_manner.get()[1](text)), sys.stderr), file=sys.stderr, flush=True)  # noqa: T201


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


def result(
    document: Callable[[], Mapping[str, Any]], blocks: Iterable[Shown | str], *, as_json: bool
) -> None:
    """Print a result on stdout as JSON, or as tables and lines; nothing with --quiet alone."""
    if as_json:
        print_json(document())
    elif not is_hushed():
        show(blocks)


def print_json(payload: Mapping[str, Any]) -> None:
    """The result as JSON on stdout."""
    _print(json.dumps(payload, indent=1, ensure_ascii=False, allow_nan=False))


def table(*arguments: Any, **options: Any) -> Shown:
    """Return one table; see `Shown.of`."""
    from prunecli.results.document import Shown

    return Shown.of(*arguments, **options)


def show(blocks: Iterable[Shown | str]) -> None:
    """Print tables and lines on stdout; lines are wrapped at the width of a terminal."""
    for block in blocks:
        if isinstance(block, str):
            _print(wrapped(plain(block), sys.stdout))
        elif block.rows:
            _show_table(block)


def _show_table(shown: Shown) -> None:
    """Print a table as several below one another if the output is too narrow for one."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = _columns(sys.stdout) or NO_TERMINAL_WIDTH
    # No markup and no emoji: names of checkpoints and languages may hold brackets and colons.
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=width, height=25)
    columns = {
        name: [NOTHING if (text := row.get(name)) is None else plain(text) for row in shown.rows]
        for name in shown.columns
    }
    texts = shown.columns[: shown.texts]
    with console.capture() as captured:
        if shown.title:
            # A table would wrap a title at its own width.
            console.print(Text(plain(shown.title), style="bold"))
        for widths in blocks(columns, width, texts, max(shown.keys, len(texts))):
            part = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for name, size in widths.items():
                is_text = name in texts
                part.add_column(
                    plain(name),
                    justify="left" if is_text else "right",
                    overflow="fold",
                    width=None if is_text else size,
                )
            for row in zip(*(columns[name] for name in widths), strict=True):
                part.add_row(*row)
            console.print(part, width=width)
    text = captured.get().removesuffix("\n")
    _print(text if console.is_terminal else "\n".join(line.rstrip() for line in text.split("\n")))


def _columns(stream: TextIO) -> int | None:
    """Columns that COLUMNS asks for, or those of a terminal; None for a file or a pipe."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return (os.get_terminal_size(stream.fileno()).columns or 80) if stream.isatty() else None


def progress(*, has_bars: bool = False) -> Progress:
    """Bars with rate and time left in a terminal, a plain line now and then elsewhere, nothing with --quiet.

    Args:
        has_bars: whether the work draws its own bars in a terminal.
    """
    if is_hushed() or processes.rank() != 0:
        return silent
    if not sys.stderr.isatty() or os.environ.get("TERM") in DUMB:
        return _lines
    return silent if has_bars else _bars


def listeners() -> dict[str, Any]:
    """Return the arguments of a function that shows how far it is and says what it chooses."""
    return {"progress": progress(), "say": note}


@contextmanager
def _bars(description: str, total: float | None = None, unit: str = "steps") -> Iterator[Advance]:
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
def _lines(description: str, total: float | None = None, unit: str = "steps") -> Iterator[Advance]:
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
LONGEST_NAME = 20
"""Letters that a column of text has at least, if it needs them, before columns go into a second table."""


def blocks(
    columns: Mapping[str, Sequence[str]], width: int, texts: Sequence[str], keys: int
) -> list[dict[str, int]]:
    """Widths of the columns of each table that shows some of the columns.

    Args:
        columns: heading -> cells.
        width: number of letters of a line.
        texts: columns whose cells are text or names, which may be folded.
        keys: number of the first columns, which every table has.
    """
    names = list(columns)
    whole, least = {}, {}
    for name, cells in columns.items():
        longest = max(map(len, cells))
        whole[name] = max(longest, *map(len, name.split("\n")))
        is_text = name in texts
        size = min(LONGEST_NAME, max(map(_longest, cells))) if is_text else longest
        least[name] = max(size, _longest(name))

    def fits(sizes: Mapping[str, int], chosen: Sequence[str]) -> bool:
        return EDGES + GAP * (len(chosen) - 1) + sum(map(sizes.__getitem__, chosen)) <= width

    groups = [names[:keys]]
    for name in names[keys:]:
        if len(groups[-1]) > keys and not fits(least, [*groups[-1], name]):
            groups.append(names[:keys])
        groups[-1].append(name)
    # Headings are wrapped if the table is too wide with whole ones.
    return [{name: (whole if fits(whole, group) else least)[name] for name in group} for group in groups]


def _longest(text: str) -> int:
    return max(map(len, text.split()), default=0)
