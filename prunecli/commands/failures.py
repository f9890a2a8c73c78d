"""The one table that turns what ended a command into plain lines and an exit status."""

import errno
import os
import sys
from traceback import walk_tb

from pydantic import ValidationError

from prunecli.errors import (
    CheckpointError,
    DataError,
    MemoryShortError,
    PruneError,
    StatisticsError,
    UnsupportedModelError,
    kind_and_reason,
)
from prunecli.tensors.hub.names import with_origins

INTERRUPTED = "Interrupted: no output is half-written."
BUG = 70
"""EX_SOFTWARE of sysexits.h: the exit status of a fault of prunecli's own."""

AT_WORK = ("transformers.models.", "transformers.generation.")
"""Modules of transformers that run a model, layers of prunecli's own within it."""

LOOP = "Symlink loop from "
"""What pathlib raises a RuntimeError with before Python 3.13; then the system says it."""

REMEDIES = {
    CheckpointError: "Fetch or copy the checkpoint again; if its files are as published, report this message.",
    UnsupportedModelError: "Choose another model or method; `prunecli inspect` shows what a model consists of.",
    StatisticsError: "Collect the statistics again, or name another file.",
    DataError: "Correct the file, or name another file.",
}
"""Error -> what the user can do, if the error does not say what."""

CHECK_PATH = "Check this path and the links in it, or give another path."
FREE_SPACE = "Free some space or choose another path."
CHANGE_PERMISSION = "Change the permissions of this file and its directory, or give another path."
SYSTEM_ERRORS = {
    errno.ENOSPC: ("no space left on the disk", FREE_SPACE),
    errno.EDQUOT: ("the disk quota is used up", FREE_SPACE),
    errno.EACCES: ("no permission", CHANGE_PERMISSION),
    errno.EPERM: ("no permission", CHANGE_PERMISSION),
    errno.EROFS: ("the file system is read-only", "Choose an output on a disk that can be written."),
    errno.EIO: ("the disk failed", "Copy the files to another disk, and run the command there."),
    errno.EMFILE: ("too many open files", "Allow a process more files: ulimit -n 4096."),
}
"""Number of a system error -> what is wrong, what the user can do."""

REPORT = "please report it with what --debug shows."


def describe(error: BaseException) -> tuple[str, int]:
    """The plain lines for a failure and the exit status; re-raises what is a bug."""
    if isinstance(error, MemoryShortError):
        from prunecli.evaluation.capacity import remedy

        error.remedy = remedy(error)
    if isinstance(error, PruneError):
        error.remedy = error.remedy or REMEDIES.get(type(error))
        return f"Error: {with_origins(str(error))}", error.exit_status
    if isinstance(error, KeyboardInterrupt):  # before a command began
        return INTERRUPTED, 130
    full = None
    if "torch" in sys.modules:
        from prunecli.modules.devices import full_device

        full = full_device(error)
    if isinstance(error, MemoryError) or full == "the host":
        return "Error: out of memory.\nTry a smaller --batch-tokens, or a smaller model.", 1
    if full is not None:
        return (
            f"Error: out of memory on {full}.\nTry a smaller --batch-tokens, --batch-size or --beam, "
            "--compute-dtype bfloat16, --memory where the command has it, or --device cpu.",
            1,
        )
    if isinstance(error, OSError) and error.strerror:
        where, advice = f" ({error.filename})", CHECK_PATH
        if not error.filename:
            where, advice = "", "Run the same command again."
        what, advice = SYSTEM_ERRORS.get(error.errno or 0, (error.strerror, advice))
        return f"Error: {what}{where}.\n{advice}", 1
    if isinstance(error, RuntimeError) and str(error).startswith(LOOP):
        return f"Error: {os.strerror(errno.ELOOP)} ({str(error).removeprefix(LOOP)}).\n{CHECK_PATH}", 1
    if (said := _of_transformers(error) or _of_record(error)) is not None:
        return said, 1
    raise error


def unforeseen(error: BaseException) -> tuple[str, int]:
    """Return the message about a bug; `--debug` shows the traceback."""
    return f"Error: a fault in prunecli: {kind_and_reason(error)}\n{REPORT.capitalize()}", BUG


def _of_transformers(error: BaseException) -> str | None:
    """Return the message if transformers failed at a model, a tokenizer or settings that it had accepted before.

    It checks few values of config.json at the making: 3 heads for 2 key/value heads, or an id beyond the table, end
    in an error of torch in the midst of a forward pass.
    """
    if not isinstance(error, Exception):
        return None
    passed = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    last = max((at for at, name in enumerate(passed) if name.startswith("prunecli.")), default=-1)
    below = any(name.startswith("transformers.") for name in passed[last + 1 :])
    if not below and not any(name.startswith(AT_WORK) for name in passed):
        return None
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    return (
        f"Error: transformers {version} fails at work on this model: {kind_and_reason(error)}\n"
        "A value in its config.json, generation_config.json or tokenizer is damaged, or its files do not belong "
        f"together; if they are right, {REPORT}"
    )


def _of_record(error: BaseException) -> str | None:
    """Return the message about a figure out of range, computed from impossible sizes or statistics."""
    if not isinstance(error, ValidationError):
        return None
    fault = error.errors(include_url=False)[0]
    where = ".".join(map(str, fault["loc"]))
    value = repr(fault["input"])[:40]
    return (
        f"Error: {where} of the result comes out as {value}: {fault['msg'].lower()}\n"
        "A size in config.json or a figure in the statistics is beyond what can be; if they are right, "
        f"{REPORT}"
    )
