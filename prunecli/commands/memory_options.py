"""`--memory` and `--spill-dir` of commands that run a model layer by layer where they are told to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prunecli.commands import console
from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.running.layerwise.runner import RunReport

MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Run layer by layer within so much memory, such as 8GiB.",
        metavar="SIZE",
    ),
]
SpillDirOption = Annotated[
    Path | None,
    typer.Option(
        help="With --memory: where a file goes for what the text's hidden states need beyond it; "
        "default: the folder for temporary files.",
        metavar="DIR",
    ),
]


def memory_bytes(memory: str | None, spill_directory: Path | None) -> int | None:
    """The size that is asked for, in bytes; before torch is imported, which is told to use huge pages.

    Raises:
        UsageError: not a size; or a directory without one.
    """
    from prunecli.tensors.quantities import parse_size

    if memory is None:
        if spill_directory is not None:
            raise UsageError("--spill-dir goes with --memory", "Give --memory SIZE, or leave it out.")
        return None
    ask_huge_pages()
    return parse_size(memory)


def ask_huge_pages() -> None:
    """Have torch ask for huge pages, of which it takes note at its first tensor: see modules.layerwise.machine."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def report_run(run: RunReport, label: str | None = None, *, back: bool = False) -> None:
    """Say what a run layer by layer read.

    Args:
        label: of the checkpoint, where there are several.
        back: whether it went back through the layers too.
    """
    rate = console.bytes_text(run.bytes_read / max(run.seconds, 1e-9))
    times = "once" if run.readings == 1 else f"in {run.readings} groups"
    spilled = f"; {console.bytes_text(run.spilled_bytes)} of states in a file" if run.spilled_bytes else ""
    console.note(
        f"{'' if label is None else f'{label}: '}Went through the layers{' and back' if back else ''} {times}: "
        f"{console.bytes_text(run.bytes_read)} of weights read, {rate} a second{spilled}."
    )
