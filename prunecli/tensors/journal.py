"""What of an unfinished directory is complete: a small file in it, by which the same work goes on later."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

NAME = ".unfinished.json"
"""Of the file; a finished directory has none."""

FORMAT = "prunecli.unfinished/1"


class Journal:
    """The complete files of a directory that is being written.

    A file is named once it is on the disk, so that not even a power failure leaves one named that is not whole.

    Attributes:
        key: of the work: everything that its bytes depend on.
        complete: file -> bytes.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self.directory = directory
        self.key = key
        self.complete: dict[str, int] = dict(read(directory, key))

    def has(self, file: str) -> bool:
        """Whether a file need not be written again."""
        return file in self.complete

    def add(self, file: str) -> None:
        """Note a file that is written.

        Raises:
            OSError: the disk is full, among others.
        """
        sync(self.directory / file)
        self.complete[file] = (self.directory / file).stat().st_size
        content = {"format": FORMAT, "key": self.key, "complete": self.complete}
        new = self.directory / f"{NAME}.new"
        new.write_text(json.dumps(content) + "\n", encoding="utf-8")
        sync(new)
        new.replace(self.directory / NAME)
        sync(self.directory)

    def tidy(self) -> None:
        """Remove everything else from the directory."""
        for path in self.directory.iterdir():
            if path.name != NAME and path.name not in self.complete:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def close(self) -> None:
        """Remove the file: the directory is finished."""
        (self.directory / NAME).unlink(missing_ok=True)


def read(directory: Path, key: str) -> Mapping[str, int]:
    """The complete files that a journal in a directory names; none where it is of other work, damaged or missing."""
    try:
        content = json.loads((directory / NAME).read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["key"] != key:
            return {}
        named = {str(file): int(nbytes) for file, nbytes in content["complete"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return {file: nbytes for file, nbytes in named.items() if _is_whole(directory, file, nbytes)}


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


def _is_whole(directory: Path, file: str, nbytes: int) -> bool:
    path = directory / file
    return (
        Path(file).name == file and not path.is_symlink() and path.is_file() and path.stat().st_size == nbytes
    )
