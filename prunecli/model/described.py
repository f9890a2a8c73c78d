"""Models without their weights: of the hub, by config.json and the headers of its files; and by config.json alone."""

from pathlib import Path
from typing import Any

from prunecli.errors import CheckpointError, located
from prunecli.model.checkpoint import Checkpoint, directory_of, open_model
from prunecli.model.streamed import read_headers, remote_files, unfetched_weights
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.tensors.directory import read_config
from prunecli.tensors.hub.fetch import Snapshot, host, look_up, plain_errors
from prunecli.tensors.hub.names import hub_name
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.reader import Stored, TensorInfo, WeightFile
from prunecli.tensors.writer import SINGLE_FILE


class DescribedCheckpoint(Checkpoint):
    """A checkpoint whose tensors are known and not at hand: reading one is a `CheckpointError`.

    Two names that config.json ties count as one tensor: their values cannot be compared.
    """

    is_local = False

    def __init__(self, snapshot: Snapshot, files: tuple[WeightFile, ...]) -> None:
        assert snapshot.sizes is not None
        self._sizes = {file.path: snapshot.sizes[file.path.name] for file in files}
        super().__init__(snapshot.directory, read_config(snapshot.directory), files)

    def file_bytes(self, path: Path) -> int:
        """The size of one of `files`."""
        return self._sizes[path]

    def location(self, name: str) -> tuple[int, int, int]:
        """There is none.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"{self.path}: {name} was described by the hub and not fetched")

    def _equal(self, _one: str, _other: str) -> bool:
        return True


class ConfiguredCheckpoint(Checkpoint):
    """A model that has no weights yet: the tensors that its config.json asks for, in float32.

    Args:
        file: its config.json, for messages.
        config: the values of that.

    Raises:
        UnsupportedModelError: its class says nothing.
        CheckpointError: config.json lacks a size, or says what cannot be.
    """

    is_local = False

    def __init__(self, file: Path, config: dict[str, Any]) -> None:
        with located(file):
            shapes = Checkpoint(file.parent, config, ()).layout.shapes
        tensors = {name: Stored(TensorInfo(name, "F32", shape), 0) for name, shape in shapes.items()}
        super().__init__(file.parent, config, (WeightFile(file.with_name(SINGLE_FILE), tensors),))

    def _equal(self, _one: str, _other: str) -> bool:
        return False  # an alias that is asked for is a tensor of its own


def describe_checkpoint(name: Path | str, *, say: Say = unsaid, progress: Progress = silent) -> Checkpoint:
    """Open a directory, or describe a model of the hub that is not in the cache, without its weights.

    Raises:
        HubError: as `local_directory`; or its weights are .bin files, whose headers cannot be had alone.
        CheckpointError: not a checkpoint, or a damaged one.
    """
    hub = hub_name(name)
    if hub is None:
        return open_model(directory_of(name, say))
    with plain_errors(hub):
        snapshot = look_up(hub, say)
        if snapshot.sizes is None or snapshot.is_whole():
            return open_model(snapshot.directory)
        files, size = unfetched_weights(snapshot)
        count = "the header of" if len(files) == 1 else f"{len(files)} headers of"
        say(f"Reading {count} {snapshot} from {host()}; its {bytes_text(size)} are not fetched.")
        described = read_headers(snapshot, remote_files(snapshot, files), progress)
        return DescribedCheckpoint(snapshot, tuple(described.values()))
