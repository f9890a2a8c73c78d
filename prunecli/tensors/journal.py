"""What of an unfinished directory is complete: a small file in it, by which the same work goes on later."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from prunecli.tensors.json_files import lenient, read_json

NAME = ".unfinished.json"
"""Of the file; a finished directory has none."""

FORMAT = "prunecli.unfinished/1"


@dataclass(frozen=True)
class Begun:
    """A file of which a part is written.

    Attributes:
        file: its name.
        layout: digest of the steps that write it.
        steps: how many of them, from the first on, are done.
        nbytes: that these have written.
    """

    file: str
    layout: str
    steps: int
    nbytes: int


@dataclass(frozen=True)
class Content:
    """What is done of some work.

    Attributes:
        complete: file -> bytes.
        begun: the file that is being written.
    """

    complete: Mapping[str, int] = field(default_factory=dict)
    begun: Begun | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that need not be written again."""
        return sum(self.complete.values()) + (0 if self.begun is None else self.begun.nbytes)


class Journal:
    """What is done of the files of a directory that is being written.

    It is noted once it is on the disk, so that not even a power failure leaves a note of what is not there.

    Attributes:
        key: of the work: everything that its bytes depend on.
        content: what is done.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self.directory = directory
        self.key = key
        self.content = read(directory, key)

    def has(self, file: str) -> bool:
        """Whether a file need not be written again."""
        return file in self.content.complete

    def done(self, file: str, layout: str) -> int:
        """How many of the steps of this digest that write a file are done."""
        begun = self.content.begun
        return begun.steps if begun is not None and (begun.file, begun.layout) == (file, layout) else 0

    def note(self, begun: Begun) -> None:
        """Note how far a file is.

        Raises:
            OSError: the disk is full, among others.
        """
        sync(self.directory / begun.file)
        self._write(replace(self.content, begun=begun))

    def add(self, file: str) -> None:
        """Note a file that is complete.

        Raises:
            OSError: the disk is full, among others.
        """
        path = self.directory / file
        sync(path)
        self._write(Content({**self.content.complete, file: path.stat().st_size}))

    def tidy(self) -> None:
        """Remove everything else from the directory."""
        begun = self.content.begun
        named = {NAME, *self.content.complete, *(() if begun is None else (begun.file,))}
        for path in self.directory.iterdir():
            if path.name in named:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def close(self) -> None:
        """Remove the file: the directory is finished."""
        (self.directory / NAME).unlink(missing_ok=True)

    def _write(self, content: Content) -> None:
        self.content = content
        new = self.directory / f"{NAME}.new"
        new.write_text(
            json.dumps({"format": FORMAT, "key": self.key, **asdict(content)}) + "\n", encoding="utf-8"
        )
        sync(new)
        new.replace(self.directory / NAME)
        sync(self.directory)


def read(directory: Path, key: str) -> Content:
    """What a journal in a directory says is done; nothing where it is of other work, damaged or missing."""
    return _read(directory, key) or Content()


@lenient
def _read(directory: Path, key: str) -> Content:
    from pydantic import TypeAdapter

    found = read_json(directory / NAME, FORMAT)
    if found["key"] != key:
        return Content()
    content = TypeAdapter(Content).validate_python(found)
    begun = content.begun
    whole = {file: size for file, size in content.complete.items() if _size(directory, file) == size}
    is_there = begun is not None and begun.steps > 0 and _size(directory, begun.file) >= begun.nbytes > 0
    return Content(whole, begun if is_there else None)


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


def _size(directory: Path, file: str) -> int:
    """Bytes of a file that lies in the directory itself and is no link; -1: there is none."""
    path = directory / file
    is_file = Path(file).name == file and not path.is_symlink() and path.is_file()
    return path.stat().st_size if is_file else -1
