"""A result directory appears whole or not at all: it is written beside its place and renamed at the end."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prunecli.errors import OutputError

SPARE_BYTES = 16 << 20
"""Room for the small files beside the weights."""


@contextmanager
def new_directory(
    target: Path, *, force: bool, needed_bytes: int, source: Path | None = None
) -> Iterator[Path]:
    """A hidden directory beside `target` to write into; it becomes `target` when the block ends well.

    Whatever ends the block early (an error, Ctrl-C, a polite kill) removes it and leaves `target` as it was.

    Args:
        force: replace an existing `target`, at the very end.
        needed_bytes: what will be written; the file system must have that much free.
        source: a directory that `target` must neither be, hold nor lie in.

    Raises:
        OutputError: `target` exists, cannot be made, overlaps `source`, or the disk lacks room.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 (a link stays a link)
    refuse_target(target, force=force, source=source)
    _sweep(target)
    _require_room(target, needed_bytes)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        yield partial
        _publish(partial, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(
                f"{target}: the disk is full; nothing was written",
                "Free some space, or choose another --output.",
            ) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_target(target: Path, *, force: bool, source: Path | None = None) -> None:
    """Raise OutputError where a result cannot go, before any work is done."""
    if source is not None:
        one, other = target.resolve(), source.resolve()
        if one == other or one in other.parents or other in one.parents:
            raise OutputError(f"{target}: overlaps the checkpoint {source}", "Choose another --output.")
    if os.path.lexists(target) and not force:
        raise OutputError(f"{target}: exists already", "Choose another --output, or replace it with --force.")
    if os.path.lexists(target) and (target.is_symlink() or not (target / "config.json").is_file()):
        raise OutputError(
            f"{target}: is not a checkpoint directory; --force replaces only those",
            "Choose another --output.",
        )
    if not target.parent.is_dir():
        raise OutputError(f"{target.parent}: no such directory", "Make it first, or choose another --output.")


def _require_room(target: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes + SPARE_BYTES:
        raise OutputError(
            f"{target.parent}: {(needed_bytes + SPARE_BYTES) / 2**30:.2f} GiB are needed, {free / 2**30:.2f} are free",
            "Free some space, or choose another --output.",
        )


def _publish(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove what killed processes left behind; a killed swap gives the old result back."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"(\d+)\.(partial|old)")
    for path in target.parent.iterdir():
        found = pattern.fullmatch(path.name)
        if found and not _is_alive(int(found.group(1))):
            if found.group(2) == "old" and not target.exists():
                path.rename(target)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
