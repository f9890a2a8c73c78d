"""A result, directory or file, appears whole or not at all: written beside its place and renamed at the end."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from prunecli.errors import HubError, OutputError
from prunecli.tensors.journal import Journal, read, sync
from prunecli.tensors.quantities import bytes_text

SPARE_BYTES = 16 << 20
"""Room for the small files beside the weights."""

_TERMINATIONS: tuple[int, ...] = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


@contextmanager
def new_directory(
    target: Path,
    *,
    force: bool,
    needed_bytes: int,
    source: Path | None = None,
    resume: str | None = None,
) -> Iterator[Path]:
    """A hidden directory beside `target` to write into; it becomes `target` when the block ends well.

    Whatever ends the block early (an error, Ctrl-C, SIGTERM, SIGHUP) removes it and leaves `target` as it was. What
    a SIGKILL left behind goes when the same target is written the next time. As with `cp`, the disk may take the
    files a little later; only an old `target` is kept until it has.

    Args:
        force: replace an existing `target`, at the very end.
        needed_bytes: what will be written; the file system must have that much free.
        source: a directory that `target` must neither be, hold nor lie in.
        resume: the key of work that goes on from what is left of it. Then a hub that gives nothing more, SIGTERM and
            SIGHUP leave what the directory's `Journal` names, and work of the same key begins with those
            and with what a SIGKILL left. Ctrl-C and all else remove it as ever, and so does work of another key.

    Raises:
        OutputError: `target` exists, cannot be written, overlaps `source`, or the disk lacks room.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 (a link stays a link)
    refuse_target(target, force=force, source=source)
    partial = partial_name(target)
    with _termination_as_exit():
        is_kept = False
        try:
            begun = None if resume is None else _unfinished(target, resume)
            sweep(target, begun)
            require_space(
                target, needed_bytes - (0 if begun is None or resume is None else _held(begun, resume))
            )
            if begun is None:
                partial.mkdir()
            else:
                begun.rename(partial)
            yield partial
            _publish(partial, target, force=force)
        except OSError as error:
            raise output_error(target, error) from error
        except (HubError, SystemExit):
            is_kept = resume is not None and _held(partial, resume) > 0
            raise
        finally:
            with _uninterrupted():
                if is_kept and resume is not None:
                    Journal(partial, resume).tidy()
                else:
                    shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A hidden name beside `path` to write to; it becomes `path` when the block ends well.

    Whatever ends the block early removes it and leaves `path` as it was. What a SIGKILL left behind goes when the same
    file is written the next time.

    Raises:
        OutputError: its directory does not exist, `path` is there and no file, or the file cannot be written.
    """
    partial = partial_name(path)
    if os.path.lexists(path) and not path.is_file():  # root may rename over a device such as /dev/null
        raise OutputError(f"{path}: not a file, which alone is replaced", "Choose another output.")
    try:
        sweep(path)
        yield partial
        partial.replace(path)
    except FileNotFoundError as error:
        if path.parent.is_dir():
            raise output_error(path, error) from error
        raise OutputError(
            f"{path.parent}: no such directory", "Create it, or choose another output."
        ) from None
    except OSError as error:
        raise output_error(path, error) from error
    finally:
        with suppress(OSError):  # such as a name that is too long: then it was not made either
            partial.unlink(missing_ok=True)


def refuse_target(target: Path, *, force: bool, source: Path | None = None) -> None:
    """Refuse a place where a result cannot go, before any work is done.

    Raises:
        OutputError: it overlaps `source`, exists (with `force`: and is not a checkpoint), has no parent, or one that
            cannot be written to.
    """
    if source is not None:
        real, origin = target.resolve(), source.resolve()
        if real.is_relative_to(origin) or origin.is_relative_to(real):
            raise OutputError(f"{target}: overlaps the checkpoint {source}", "Choose another --output.")
    if os.path.lexists(target) and not force:
        raise OutputError(f"{target}: exists already", "Choose another --output, or replace it with --force.")
    if os.path.lexists(target) and not _is_replaceable(target):
        raise OutputError(
            f"{target}: is not a checkpoint directory; --force replaces only those",
            "Choose another --output.",
        )
    if not target.absolute().parent.is_dir():
        raise OutputError(f"{target.parent}: no such directory", "Make it first, or choose another --output.")
    if not os.access(target.absolute().parent, os.W_OK):
        raise OutputError(
            f"{target}: nothing can be written in {target.absolute().parent}", "Choose another --output."
        )


def _is_replaceable(target: Path) -> bool:
    if target.is_symlink() or not target.is_dir():
        return False
    return (target / "config.json").is_file() or not any(target.iterdir())


def require_space(target: Path, needed_bytes: int) -> None:
    """Check that the file system of `target` has `needed_bytes` free, and some more for small files.

    Raises:
        OutputError: the disk lacks space, with both numbers.
    """
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes + SPARE_BYTES:
        needed = bytes_text(needed_bytes + SPARE_BYTES)
        raise OutputError(
            f"{target.parent}: {needed} are needed, {bytes_text(free)} are free",
            "Free some space, or choose another --output.",
        )


def _to_disk(directory: Path) -> None:
    """Wait until files and folders below `directory` are on the disk."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))


def _publish(partial: Path, target: Path, *, force: bool) -> None:
    if os.path.lexists(target):
        refuse_target(target, force=force)  # it appeared meanwhile
        _to_disk(partial)  # a power failure must not take the old result and the new one
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        with _uninterrupted():
            target.rename(old)
            try:
                partial.rename(target)
            except BaseException:
                old.rename(target)
                raise
            shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(target)


def partial_name(target: Path) -> Path:
    """The hidden name under which this process writes what becomes `target`."""
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


def output_error(target: Path, error: OSError) -> OutputError:
    """What is said where the system refuses to write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(
            f"{target}: the disk is full; nothing was written", "Free some space, or choose another --output."
        )
    of = f" ({error.filename})" if error.filename else ""
    return OutputError(f"{target}: not written: {error.strerror or error}{of}", "Choose another --output.")


def _unfinished(target: Path, key: str) -> Path | None:
    """The directory with most of this work that ended processes left."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"(\d+)\.partial")
    found = [
        (_held(path, key), path)
        for path in target.parent.iterdir()
        if (match := pattern.fullmatch(path.name))
        and not _is_other_process(int(match[1]))
        and not path.is_symlink()
    ]
    held, path = max(found, default=(0, target))
    return path if held else None


def _held(directory: Path, key: str) -> int:
    """Bytes of this work that are done in a directory."""
    return read(directory, key).nbytes


def sweep(target: Path, spared: Path | None = None) -> None:
    """Remove what killed processes left behind, `spared` excepted; a killed swap gives the old result back."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"(\d+)\.(partial|old)")
    for path in target.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and path != spared and not _is_other_process(int(match[1])):
            if match[2] == "old" and not os.path.lexists(target):
                path.rename(target)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _is_other_process(pid: int) -> bool:
    """Whether `pid` runs and is not this process (containers give the same number again and again)."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process as an exception, so that cleaning up happens; main thread only."""
    is_main = threading.current_thread() is threading.main_thread()
    signals = [n for n in _TERMINATIONS if is_main and signal.getsignal(n) == signal.SIG_DFL]
    for number in signals:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise SystemExit(128 + number)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and polite kills wait until the block ends; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    numbers = (int(signal.SIGINT), *_TERMINATIONS)
    before = [signal.signal(number, lambda got, _frame: arrived.append(got)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])
