"""Git LFS pointers: what `git clone` leaves in the place of a large file where Git LFS is not installed."""

from __future__ import annotations

from pathlib import Path

from prunecli.errors import CheckpointError, PruneError

BEGINNING = b"version https://git-lfs"
LONGEST = 1024
"""Bytes: a pointer is shorter, by Git LFS's own specification."""


def refuse_pointer(path: Path, error: type[PruneError] = CheckpointError) -> None:
    """For a reader's beginning, so that a pointer is not called damaged; a file that cannot be read is left to it.

    Raises:
        CheckpointError: (or `error`) the file is a Git LFS pointer.
    """
    try:
        with path.open("rb") as file:
            start = file.read(LONGEST)
    except OSError:
        return
    if start.startswith(BEGINNING) and len(start) < LONGEST:
        raise error(f"{path}: a Git LFS pointer, not the file", "Run `git lfs pull` in its directory.")
