"""Git LFS pointers: what `git clone` leaves in the place of a large file where Git LFS is not installed."""

from __future__ import annotations

from pathlib import Path

from prunecli.errors import CheckpointError, PruneError

BEGINNING = b"version https://git-lfs"
BESIDE_WEIGHTS = (
    "*token*.json", "vocab*", "merges.txt", "*.model", "*.spm", "*.tiktoken",
    "*processor*.json", "generation_config.json",
)  # fmt: skip
"""Files of a checkpoint directory that its model does not work without, weights and config.json apart."""
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


def refuse_pointers_beside_weights(directory: Path) -> None:
    """For whoever loads or copies them.

    Raises:
        CheckpointError: tokenizer, processor or generation config is a Git LFS pointer.
    """
    for path in sorted({file for pattern in BESIDE_WEIGHTS for file in directory.glob(pattern)}):
        refuse_pointer(path)
