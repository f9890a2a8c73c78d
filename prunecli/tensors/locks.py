"""Locks that the kernel holds for a process until it ends, however it ends.

Process ids cannot say whether a writer is alive: ids are used again, two containers both have a process 1, and another
machine may write to the same file system.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def acquire(path: Path, *, shared: bool = False) -> int | None:
    """Lock the file `path`, which is made if need be; closing the returned descriptor frees the lock.

    A process may remove the file while it holds the lock alone: who waited for it locks the next file of that name.

    Args:
        shared: hold the lock together with others, and wait while one process holds it alone.

    Returns:
        None: the file system has no locks, as some of networks.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be made.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        held = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            pass
        except BlockingIOError:
            raise
        except OSError:  # no locks here
            path.unlink(missing_ok=True)
            return None
        finally:
            if not held:
                os.close(descriptor)
        if held:
            return descriptor


@contextmanager
def writing(path: Path, when_alone: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the file `path` together with other writers; the last of them removes the file.

    Args:
        when_alone: called first if no other process holds the lock. No other process enters until it returns.

    Raises:
        OSError: the file cannot be made.
    """
    with _alone(path) as alone:
        if alone:
            when_alone()
    held = acquire(path, shared=True)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)
            with _alone(path) as alone:
                if alone:
                    path.unlink(missing_ok=True)


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Hold the lock, if no other process holds it; whether this one does."""
    try:
        held = acquire(path)
    except BlockingIOError:
        held = None
    try:
        yield held is not None
    finally:
        if held is not None:
            os.close(held)
