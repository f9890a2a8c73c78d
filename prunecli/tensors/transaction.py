"""A result, directory or file, appears whole or not at all: written beside its place and renamed at the end."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from platform import node
from secrets import token_hex

from prunecli.errors import HubError, OutputError
from prunecli.processes import terminations_as_exit, undisturbed
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.unfinished import Journal, acquire, digest, sync

SPARE_BYTES = 16 << 20
"""Room for the small files beside the weights."""


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

    def done(path: Path) -> int:
        return 0 if path.is_symlink() or not path.is_dir() else Journal(path, resume).nbytes

    with terminations_as_exit():
        try:
            with _hidden(target, done) as partial:
                is_kept = False
                try:
                    require_space(target, needed_bytes - done(partial))
                    partial.mkdir(exist_ok=True)
                    yield partial
                    _publish(partial, target, force=force)
                except (HubError, SystemExit):
                    is_kept = done(partial) > 0
                    raise
                finally:
                    with undisturbed():
                        if is_kept:
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
    refuse_output(path, "file", force=True)
    try:
        with _hidden(path) as partial:
            try:
                yield partial
                partial.replace(path)
            finally:
                with suppress(OSError):  # such as a name that is too long: then it was not made either
                    partial.unlink(missing_ok=True)
    except OSError as error:
        raise output_error(path, error) from error


def refuse_output(path: Path, kind: str, *, force: bool) -> None:
    """Refuse a place where no result can be written.

    Args:
        kind: "file" or "directory", which the result is.
        force: whether a file is replaced; of directories, only checkpoints and empty ones.

    Raises:
        OutputError: something is there that is not replaced, or its directory is missing or cannot be written to.
    """
    other = "Choose another path."
    parent = path.absolute().parent
    if kind == "file" and path.is_dir():
        raise OutputError(f"{path}: a directory, where a file is to be written", other)
    if os.path.lexists(path):
        if not force:
            raise OutputError(f"{path}: exists already", "Choose another path, or replace it with `force`.")
        if kind == "file" and not path.is_file():  # root may rename over a device such as /dev/null
            raise OutputError(f"{path}: not a file, which alone is replaced", other)
        is_old = path.is_dir() and not path.is_symlink()
        if kind == "directory" and not (
            is_old and ((path / "config.json").is_file() or not any(path.iterdir()))
        ):
            raise OutputError(f"{path}: is not a checkpoint directory; `force` replaces only those", other)
    if not parent.is_dir():
        raise OutputError(f"{path.parent}: no such directory", "Make it first, or choose another path.")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{path}: nothing can be written in {parent}", other)


def refuse_target(target: Path, *, force: bool, source: Path | None = None) -> None:
    """`refuse_output` for a checkpoint directory, which must not overlap the one that it is made of.

    Raises:
        OutputError: as `refuse_output`; or it overlaps `source`.
    """
    if source is not None:
        real, origin = target.resolve(), source.resolve()
        if real.is_relative_to(origin) or origin.is_relative_to(real):
            raise OutputError(f"{target}: overlaps the checkpoint {source}", "Choose another path.")
    refuse_output(target, "directory", force=force)


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
            "Free some space, or choose another path.",
        )


def output_error(target: Path, error: OSError) -> OutputError:
    """Describe an error of the system in writing `target`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(
            f"{target}: the disk is full; nothing was written", "Free some space, or choose another path."
        )
    of = f" ({error.filename})" if error.filename else ""
    return OutputError(f"{target}: not written: {error.strerror or error}{of}", "Choose another path.")


def _publish(partial: Path, target: Path, *, force: bool) -> None:
    if not os.path.lexists(target):
        partial.rename(target)
        return
    refuse_target(target, force=force)  # it appeared meanwhile
    # A power failure must not take the old result and the new one.
    for folder, _, files in os.walk(partial, topdown=False):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))
    old = partial.with_suffix(".old")
    with undisturbed():
        target.rename(old)
        try:
            partial.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)


@cache
def _machine() -> tuple[str, str]:
    """Short digests of the running kernel, which containers share, and of the host's name, which outlives a boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    names = (boot.read_text() if boot.is_file() else node(), node())
    return digest(names[0])[:6], digest(names[1])[:6]


@contextmanager
def _hidden(target: Path, done: Callable[[Path], int] = lambda _: 0) -> Iterator[Path]:
    """A hidden name beside `target`, whose lock this process holds within the block.

    A writer called TOKEN writes `.NAME.TOKEN.partial`, replaces `.NAME.TOKEN.old` and holds the lock
    `.NAME.TOKEN.lock`. Where the lock can be had, the writer has ended: its files go, and an old result that was on its
    way out comes back. Where the file system has no locks, nothing is taken for abandoned.

    Args:
        done: bytes of a partial result from which this process goes on; it takes over the one with most.
    """
    pattern = re.compile(re.escape(f".{target.name}.") + r"(\d+(?:-\w+)?)\.(?:partial|old|lock)")
    tokens = {match[1] for path in target.parent.iterdir() if (match := pattern.fullmatch(path.name))}
    with ExitStack() as locks:

        def place(token: str, ending: str) -> Path:
            return target.with_name(f".{target.name}.{token}.{ending}")

        def locked(token: str) -> bool:
            path = place(token, "lock")
            try:
                held = acquire(path)
            except BlockingIOError:
                return False
            if held is None:
                return False
            locks.callback(os.close, held)
            locks.callback(path.unlink, missing_ok=True)
            return True

        def is_own(token: str) -> bool:
            """A network file system may keep locks to the machine: what another one writes is left alone."""
            return "-" not in token or any(digest in token for digest in _machine())

        ended = sorted(
            (token for token in tokens if is_own(token) and locked(token)),
            key=lambda token: done(place(token, "partial")),
        )
        taken = ended[-1] if ended and done(place(ended[-1], "partial")) else None
        for token in ended:
            old = place(token, "old")
            if os.path.lexists(old) and not os.path.lexists(target):
                old.rename(target)
            for path in (old, *([] if token == taken else [place(token, "partial")])):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        if taken is None:
            taken = f"{os.getpid()}-{''.join(_machine())}{token_hex(2)}"
            locked(taken)
        yield place(taken, "partial")
