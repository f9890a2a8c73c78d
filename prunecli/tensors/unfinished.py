"""Unfinished work: records in a file of JSON lines, from which a later run goes on, and the lock of a writer."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from prunecli.tensors.json_files import lenient, parsed

NAME = ".unfinished.jsonl"
"""The store's file in a directory that is being written; a finished directory has none."""


def digest(value: Any) -> str:
    """sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Store:
    """Records by name. Each is on the disk before `put` returns.

    Lines that a kill cut short, that are damaged or that belong to other work count as missing.

    Attributes:
        path: the file; None: nothing is kept.
        work: names everything that the records depend on.
        records: name -> the JSON value put last.
    """

    def __init__(self, path: Path | None, work: str = "") -> None:
        self.path = path
        self.work = work
        self.records: dict[str, Any] = {}
        self._lines = 0
        if path is not None and path.is_file() and not path.is_symlink():
            for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
                self._take(line)

    def put(self, name: str, value: Any) -> None:
        """Add or replace a record. The file is rewritten once most of its lines are replaced ones.

        Raises:
            OSError: the disk is full, among others.
        """
        self.records[name] = value
        if self.path is None:
            return
        if self._lines > 2 * len(self.records) + 8:
            new = self.path.with_name(f"{self.path.name}.new")
            new.write_text("".join(map(self._line, self.records)), encoding="utf-8")
            sync(new)
            new.replace(self.path)
            self._lines = len(self.records)
        else:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(self._line(name))
            self._lines += 1
        sync(self.path)
        sync(self.path.parent)

    def remove(self) -> None:
        """Remove the file: the work is finished."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _line(self, name: str) -> str:
        record = [self.work, name, self.records[name]]
        # A line that an interrupt cut short has no end: each begins on a new one.
        return "\n" + json.dumps({"record": record, "sha256": digest(record)})

    @lenient
    def _take(self, line: str) -> None:
        entry = parsed(line)
        work, name, value = entry["record"]
        if work == self.work and entry["sha256"] == digest(entry["record"]):
            self.records[name] = value
            self._lines += 1


class Journal(Store):
    """How far the files of a directory are written.

    A record is [bytes, steps done, digest of the steps] under the name of the file; 0 steps: it is complete. Without
    `work` nothing is noted: the files are written anew each time.
    """

    def __init__(self, directory: Path, work: str | None) -> None:
        super().__init__(None if work is None else directory / NAME, work or "")
        self.directory = directory
        for file, (nbytes, steps, _) in list(self.records.items()):
            path = directory / file
            is_file = Path(file).name == file and not path.is_symlink() and path.is_file()
            size = path.stat().st_size if is_file else -1
            if size < nbytes or (not steps and size != nbytes):
                del self.records[file]

    @property
    def nbytes(self) -> int:
        """Bytes that need not be written again."""
        return sum(nbytes for nbytes, _, _ in self.records.values())

    def has(self, file: str) -> bool:
        """Whether a file is complete."""
        return file in self.records and not self.records[file][1]

    def steps(self, file: str, layout: str) -> int:
        """How many of the steps that write a file, whose digest is `layout`, are done; 0 if it is another digest."""
        _, steps, noted = self.records.get(file, (0, 0, layout))
        return int(steps) if noted == layout else 0

    def note(self, file: str, nbytes: int, steps: int = 0, layout: str = "") -> None:
        """Wait until a file is on the disk and note how far it is: a power failure leaves no note of what is not there.

        Raises:
            OSError: the disk is full, among others.
        """
        if self.path is not None:
            sync(self.directory / file)
            self.put(file, [nbytes, steps, layout])

    def tidy(self) -> None:
        """Remove everything else from the directory."""
        for path in self.directory.iterdir():
            if path.name != NAME and path.name not in self.records:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk.

    Raises:
        OSError: the disk could not take it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; what the disk could not take must be heard of.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def acquire(path: Path) -> int | None:
    """Lock the file `path`, which is made if need be; closing the returned descriptor, or the process's end, frees it.

    Process ids cannot say whether a writer is alive: they are used again, and two containers both have a process 1.
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
