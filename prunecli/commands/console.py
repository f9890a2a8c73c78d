"""Where the command line prints: results to stdout, everything else to stderr; of several processes the first alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli import processes
from prunecli.progress import Progress, silent

if TYPE_CHECKING:
    from rich.table import Table

REPORT_EVERY_S = 10.0
"""Seconds between the plain progress lines of an output that is not a terminal."""

LONGEST_LINE = 1000
"""Characters of a message's line; the rest is left out."""


def plain(text: str) -> str:
    """Lines that a terminal shows as they are: values of damaged files may be endless, or hold control characters."""
    lines = []
    for line in text.split("\n"):
        shown = line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"
        lines.append("".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in shown))
    return "\n".join(lines)


def note(text: str) -> None:
    """One plain line on stderr."""
    if processes.rank() == 0:
        print(plain(text), file=sys.stderr, flush=True)  # noqa: T201


def out(text: str) -> None:
    """Plain text on stdout."""
    if processes.rank() == 0:
        print(text, flush=True)  # noqa: T201


def print_json(payload: Mapping[str, Any]) -> None:
    """The result as JSON on stdout."""
    out(json.dumps(payload, indent=1, ensure_ascii=False, allow_nan=False))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> Table:
    """A rich table; the first `text_columns` are aligned left, the others right."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < text_columns else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def show(renderable: Any) -> None:
    """Print a rich renderable on stdout; wide enough for its tables where stdout is not a terminal."""
    if processes.rank() != 0:
        return
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=160)
    console.print(renderable)


def progress(quiet: bool = False) -> Progress:
    """Bars with rate and time left in a terminal, a plain line now and then elsewhere, nothing with `quiet`."""
    if quiet or processes.rank() != 0:
        return silent
    return _bars if sys.stderr.isatty() else _lines


@contextmanager
def _bars(
    description: str, total: float | None = None, unit: str = "steps"
) -> Iterator[Callable[[float], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = (
        (DownloadColumn(), TransferSpeedColumn())
        if unit == "bytes"
        else (MofNCompleteColumn(), TextColumn(unit))
    )
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        *amount,
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
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
            left = "" if total is None or rate == 0 else f", {(total - done) / rate:,.0f} s left"
            note(f"{description}: {done:,.0f}{of} {unit}, {rate:,.1f} a second{left}")

    yield advance


def bytes_text(count: float) -> str:
    """1610612736 -> '1.50 GiB'."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def demo_checkpoint(given: Path | None) -> Path:
    """`given`, or the bundled demo model, said in one line."""
    if given is not None:
        return given
    from prunecli import demo

    note("No checkpoint given: using the bundled demo model.")
    found: Path = demo.CHECKPOINT
    return found
