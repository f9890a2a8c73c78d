"""The checkpoints that an argument names, and those that are taken where none does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prunecli.commands import console


def checkpoint_directory(given: Path) -> Path:
    """The directory of a checkpoint that the user named; a model of the hub is fetched, where it is not here yet.

    Raises:
        HubError, OutputError, CheckpointError: as `local_directory`.
    """
    from prunecli.tensors.hub.fetch import local_directory

    quiet = console.is_hushed()
    return local_directory(given, say=console.note, progress=console.lines(quiet), bars=not quiet)


def checkpoint_or_demo(given: Path | None) -> Path:
    """The directory of `given`, or the bundled demo model, said in one line."""
    if given is not None:
        return checkpoint_directory(given)
    from prunecli import demo

    console.note("No checkpoint given: using the bundled demo model.")
    return demo.CHECKPOINT


def checkpoints_or_demo(given: Sequence[Path] | None) -> list[Path]:
    """Those of `given`; else the bundled demo model and every prunecli checkpoint of the working directory."""
    if given:
        return [checkpoint_directory(path) for path in given]
    from prunecli import demo

    here = checkpoints_here()
    beside = f" with {', '.join(map(str, here))}" if here else ""
    console.note(f"No checkpoint given: using the bundled demo model{beside}.")
    return [demo.CHECKPOINT, *here]


def checkpoints_here() -> list[Path]:
    """Every prunecli checkpoint of the working directory."""
    from prunecli.model.history import written_checkpoints

    return [path.relative_to(Path.cwd()) for path in written_checkpoints(Path.cwd())]
