"""How the command ends where a reader has gone away, and what a failure is for scripts."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator

from prunecli import __version__, processes
from prunecli.commands import console

FORMAT = "prunecli.error/1"

PIPE_CLOSED = 141
"""128 + SIGPIPE: the status of a program that writes to a pipe without a reader, as `| head -1` leaves it."""


def is_closed_pipe(error: BaseException) -> bool:
    """Whether output went to a pipe without a reader; rich and typer make an exit with status 1 of that."""
    asked = _causes(error) if isinstance(error, SystemExit) else (error,)
    return any(isinstance(one, OSError) and one.errno == errno.EPIPE for one in asked)


def usage_error(error: BaseException) -> str | None:
    """What typer said of bad usage before it ended the process."""
    for one in _causes(error):
        told = getattr(one, "format_message", None)
        if told is not None:
            return f"Error: {told()}"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def discard_output() -> None:
    """Send to nowhere what Python still holds back, or it would fail once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())


def flush_output() -> None:
    """Write what Python still holds back.

    Raises:
        BrokenPipeError: nobody reads it.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()


def print_error(text: str, status: int) -> None:
    """A failure on stdout, for --json: `text` is that of stderr, its first line the message, the rest the remedy."""
    message, _, remedy = text.removeprefix("Error: ").partition("\n")
    said = {"message": message, "remedy": remedy.replace("\n", " ") or None, "status": status}
    payload = {"format": FORMAT, "prunecli": __version__, "error": said}
    if processes.rank() == 0:
        console.out(json.dumps(payload, indent=1, ensure_ascii=False))
