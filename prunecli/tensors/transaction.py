"""A result, directory or file, appears whole or not at all: written beside its place and renamed at the end."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2s
from pathlib import Path
from platform import node
from secrets import token_hex
from types import FrameType
from typing import NoReturn

from prunecli.errors import HubError, OutputError
from prunecli.tensors.journal import Journal, read, sync
from prunecli.tensors.locks import writing
from prunecli.tensors.quantities import bytes_text

SPARE_BYTES = 16 << 20
"""Room for the small files beside the weights."""

_TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)


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
    partial = _hidden_name(target, "partial")
    begun: list[Path] = []

    def clean() -> None:
        begun.extend([] if resume is None else _unfinished(target, resume))
        _sweep(target, begun)

    with _termination_as_exit():
        is_kept = False
        try:
            with writing(_lock_name(target), clean):
                try:
                    require_space(target, needed_bytes - sum(_held(path, resume or "") for path in begun))
                    try:
                        begun.pop().rename(partial)
                    except (IndexError, FileNotFoundError):  # nothing, or another writer took it up first
                        partial.mkdir()
                    yield partial
                    _publish(partial, target, force=force)
                except (HubError, SystemExit):
                    is_kept = resume is not None and _held(partial, resume) > 0
                    raise
                finally:
                    with _uninterrupted():
                        if is_kept and resume is not None:
                            Journal(partial, resume).tidy()
                        else:
                            shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            raise output_error(target, error) from error


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A hidden name beside `path` to write to; it becomes `path` when the block ends well.

    Whatever ends the block early removes it and leaves `path` as it was. What a SIGKILL left behind goes when the same
    file is written the next time.

    Raises:
        OutputError: its directory does not exist, `path` is there and no file, or the file cannot be written.
    """
    partial = _hidden_name(path, "partial")
    if os.path.lexists(path) and not path.is_file():  # root may rename over a device such as /dev/null
        raise OutputError(f"{path}: not a file, which alone is replaced", "Choose another output.")
    try:
        with writing(_lock_name(path), lambda: _sweep(path)):
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


def _publish(partial: Path, target: Path, *, force: bool) -> None:
    if os.path.lexists(target):
        refuse_target(target, force=force)  # it appeared meanwhile
        # A power failure must not take the old result and the new one.
        for folder, _, files in os.walk(partial, topdown=False):
            for name in files:
                sync(Path(folder) / name)
            sync(Path(folder))
        old = _hidden_name(target, "old")
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


_LEFT = r"\.\d+(?:-(?P<boot>\w{6})(?P<host>\w{6})\w{4})?\.(?P<kind>partial|old)"
"""What the hidden names of unfinished and of replaced results end with; in 0.2.0 with the process alone."""

FOREIGN_SECONDS = 3600.0
"""Time after which a result that another machine left unchanged is taken for abandoned."""


@cache
def _machine() -> tuple[str, str]:
    """Short digests of the running kernel, which containers share, and of the host's name, which outlives a boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # not on Linux
        boot = b""
    boot_digest, host_digest = (
        blake2s(each, digest_size=3).hexdigest() for each in (boot, os.fsencode(node()))
    )
    return boot_digest, host_digest


def _hidden_name(target: Path, kind: str) -> Path:
    """A name for what this process writes or replaces; no other process has the same."""
    return target.with_name(f".{target.name}.{os.getpid()}-{''.join(_machine())}{token_hex(2)}.{kind}")


def _lock_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.prunecli-lock")


def output_error(target: Path, error: OSError) -> OutputError:
    """What is said where the system refuses to write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(
            f"{target}: the disk is full; nothing was written", "Free some space, or choose another --output."
        )
    of = f" ({error.filename})" if error.filename else ""
    return OutputError(f"{target}: not written: {error.strerror or error}{of}", "Choose another --output.")


def _abandoned(target: Path) -> dict[Path, str]:
    """What ended writers of `target` left: path -> kind. The caller holds the lock of the writers alone."""
    found = {}
    _lock_name(target).touch()
    now = _lock_name(target).stat().st_mtime  # by the clock of the file system
    for path in target.parent.iterdir():
        if match := re.fullmatch(re.escape(f".{target.name}") + _LEFT, path.name):
            own = match["boot"] is None or match["boot"] == _machine()[0] or match["host"] == _machine()[1]
            # A network file system may keep locks to the machine: a writer elsewhere is seen by what it writes.
            with suppress(FileNotFoundError):
                changed = max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
                if own or now - changed > FOREIGN_SECONDS:
                    found[path] = match["kind"]
    return found


def _unfinished(target: Path, key: str) -> list[Path]:
    """The directory with most of this work that ended processes left, if there is one."""
    found = [
        (_held(path, key), path)
        for path, kind in _abandoned(target).items()
        if kind == "partial" and not path.is_symlink()
    ]
    return [path for held, path in [max(found, default=(0, target))] if held]


def _held(directory: Path, key: str) -> int:
    """Bytes of this work that are done in a directory."""
    return read(directory, key).nbytes


def _sweep(target: Path, spared: Sequence[Path] = ()) -> None:
    """Remove what killed processes left behind, `spared` excepted; a killed swap gives the old result back."""
    for path, kind in _abandoned(target).items():
        if path in spared:
            continue
        if kind == "old" and not os.path.lexists(target):
            path.rename(target)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


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
