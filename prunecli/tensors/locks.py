"""Locks that the kernel holds for a process until it ends, however it ends.

Process ids cannot say whether a writer is alive: they are used again, and two containers both have a process 1.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def acquire(path: Path) -> int | None:
    """Lock the file `path`, which is made if need be; closing the returned descriptor frees the lock.

    A process may remove the file while it holds the lock: whoever opened it before locks the next file of that name.

    Returns:
        None: the file system has no locks, as some network file systems.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be made.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        held = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
