"""A command in this process: how it ended, and what it printed."""

import contextlib
import io
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from unittest.mock import patch

from prunecli.commands import app, failures
from tests.commands.calls import Result


class TooLong(BaseException):
    """A command that ran longer than it may."""


@dataclass(frozen=True)
class Ran(Result):
    """The end of a command: exit status (None: an exception), output, seconds of the processor, the traceback."""

    seconds: float
    trace: str = ""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """`TooLong` after so many seconds of the processor, or ten times as many by the clock; main thread only."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooLong

    work = (signal.SIGPROF, signal.ITIMER_PROF, seconds)
    timers = (work, (signal.SIGALRM, signal.ITIMER_REAL, 10 * seconds))
    before = [signal.signal(number, stop) for number, _, _ in timers]
    for _, timer, after in timers:
        signal.setitimer(timer, after)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


class _Stream(io.TextIOWrapper):
    """A stream that, as a real one, cannot write every text."""

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()


def run(command: str, folder: Path | str = ".", limit_s: float = 30.0) -> Ran:
    """`prunecli COMMAND` in this process, with `folder` as its working directory."""
    out, err = _Stream(io.BytesIO(), "utf-8"), _Stream(io.BytesIO(), "utf-8")
    start = time.process_time()
    app.app.registered_commands.clear()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    status, trace = None, ""

    def note(error: BaseException) -> tuple[str, int]:
        nonlocal trace
        trace = "".join(traceback.format_exception(error))
        return unforeseen(error)

    unforeseen = failures.unforeseen
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(failures, "unforeseen", note))
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(warnings.catch_warnings())
        try:
            with time_limit(limit_s):
                app.main(command.split())
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except BaseException:
            trace = traceback.format_exc()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return Ran(status, out.text(), err.text(), time.process_time() - start, trace)
