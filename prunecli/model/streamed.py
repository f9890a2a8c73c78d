"""Models of the hub whose weights are read where they are, by ranges: no file of them is kept on this machine."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prunecli.errors import CheckpointError, HubError, UsageError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.fingerprint import rounded, sample_range
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.tensors.copying import near
from prunecli.tensors.directory import described, find_weights, read_config
from prunecli.tensors.hub.fetch import (
    RemoteFile,
    Snapshot,
    download,
    fetch,
    host,
    look_up,
    needed_files,
    plain_errors,
    weight_files,
)
from prunecli.tensors.hub.names import hub_name
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.reader import Handle, WeightFile, bytes_of
from prunecli.tensors.writer import CONNECTIONS

HEADER_BYTES = 100_000
"""Of a file, asked for at first: most headers are shorter."""

SAMPLES_GAP = 8 << 10
"""Bytes between two samples up to which they come with one request."""

SAMPLES_CONNECTIONS = 16
"""Requests for samples side by side: each is short, so that the way there and back is what takes time."""

SAMPLES_BYTES = 1 << 20
"""Most bytes of such a request."""


class StreamedCheckpoint(Checkpoint):
    """A checkpoint of the hub; what is read of its weights crosses the wire, that of the headers included."""

    is_remote = True

    def __init__(
        self,
        directory: Path,
        files: tuple[WeightFile, ...],
        remote: Mapping[Path, RemoteFile],
        progress: Progress = silent,
    ) -> None:
        self._remote = remote
        self._progress = progress
        super().__init__(directory, read_config(directory), files)

    @property
    def traffic(self) -> list[int]:
        """See `Checkpoint`."""
        return [nbytes for file in self._remote.values() for nbytes in file.received]

    def file_bytes(self, path: Path) -> int:
        """The size of one of `files`."""
        return self._remote[path].size if path in self._remote else super().file_bytes(path)

    def _descriptor(self, index: int, spooled: bool) -> Handle:
        path = self.files[index]
        return self._remote[path] if path in self._remote else super()._descriptor(index, spooled)

    def _samples(self) -> dict[str, bytes]:
        places = []
        for name, (file, stored) in self._stored.items():
            start, stop = sample_range(stored.info)
            places.append((file, stored.offset + start, stored.offset + stop, name, stored.info.dtype))
        requests = near(places, lambda place: place[:3], SAMPLES_GAP, SAMPLES_BYTES)
        samples: dict[str, bytes] = {}
        pool = ThreadPoolExecutor(SAMPLES_CONNECTIONS)
        try:
            with self._progress("reading samples", len(self.tensors), "tensors") as advance:
                for found in [pool.submit(self._read_samples, request) for request in requests]:
                    samples |= found.result()
                    advance(len(found.result()))
        finally:
            pool.shutdown(cancel_futures=True)
        return samples

    def _read_samples(self, places: list[tuple[int, int, int, str, str]]) -> dict[str, bytes]:
        """Samples of tensors, each (file, start, stop, name, type), of neighbouring places."""
        file, begin, *_ = places[0]
        size = places[-1][2] - begin
        data = bytes_of(self._descriptor(file, spooled=False), begin, size) if size else b""
        return {
            name: rounded(data[start - begin : stop - begin], dtype) for _, start, stop, name, dtype in places
        }


def stream_model(name: Path | str, *, say: Say = unsaid, progress: Progress = silent) -> Checkpoint:
    """Open a model of the hub without fetching its weights: what a rewrite takes of them is read by ranges.

    All is of one commit. What lies beside the weights is fetched into the hub's cache. Weight files that are there
    already are read from there, and a model that is whole in it is opened as `open_model` does.

    Args:
        name: `org/name` or `org/name@revision`.
        say: is told what is read from where.
        progress: of headers, side files and samples.

    Raises:
        UsageError: it is a directory.
        HubError: as `local_directory`; or its weights are .bin files, which cannot be read by ranges.
        CheckpointError: not a checkpoint, or a damaged one.
    """
    hub = hub_name(name)
    if hub is None:
        raise UsageError(
            f"`stream` reads a model of the hub where it is; {name} is a path.", "Leave `stream` out."
        )
    with plain_errors(hub):
        snapshot = look_up(hub, say)
        if snapshot.sizes is None or snapshot.is_whole():
            say(f"{snapshot} is in the cache and read from there.")
            return open_model(snapshot.directory)
        weights, size = unfetched_weights(snapshot)
        needed = needed_files(snapshot.sizes, snapshot.read)
        beside = [file for file in needed if file not in weights and not file.endswith(".index.json")]
        fetch(snapshot, beside, say, progress, bars=False)
        far = [file for file in weights if not (snapshot.directory / file).is_file()]
        say(
            f"Streaming {snapshot} from {host()}: of {bytes_text(size)} what the result takes is fetched, not kept."
        )
        remote = remote_files(snapshot, far)
        found = read_headers(snapshot, remote, progress)
        directory = snapshot.directory
        return StreamedCheckpoint(
            directory,
            find_weights(directory, found),
            {directory / file: source for file, source in remote.items()},
            progress,
        )


def unfetched_weights(snapshot: Snapshot) -> tuple[list[str], int]:
    """The .safetensors files of a snapshot of which the hub said the sizes, and their bytes.

    Raises:
        HubError: its weights are .bin files, of which nothing can be read without all of them.
        CheckpointError: its index names no files.
    """
    assert snapshot.sizes is not None
    stored = weight_files(snapshot.sizes, snapshot.read)
    files = [file for file in stored if not file.endswith(".json")]
    if not files:
        raise CheckpointError(f"{snapshot.name}: its index names no weight files", "Ask who published it.")
    size = sum(snapshot.sizes[file] for file in files)
    if pickled := [file for file in files if not file.endswith(".safetensors")]:
        bins = f"{len(pickled)} .bin files" if len(pickled) > 1 else pickled[0]
        raise HubError(
            f"{snapshot.name}: its weights are pickled ({bins}, {bytes_text(size)}); only .safetensors files are read "
            "without being fetched whole",
            f"Fetch them with `{download(snapshot.name)}`, and leave `stream` out: they are read from the cache.",
        )
    return files, size


def remote_files(snapshot: Snapshot, files: Iterable[str]) -> dict[str, RemoteFile]:
    """Files of a snapshot of which the hub said the sizes, to be read by ranges."""
    assert snapshot.sizes is not None
    return {file: RemoteFile(snapshot.name, snapshot.commit, file, snapshot.sizes[file]) for file in files}


def read_headers(
    snapshot: Snapshot, files: Mapping[str, RemoteFile], progress: Progress
) -> dict[str, WeightFile]:
    """Read the headers of .safetensors files.

    Raises:
        CheckpointError: a header is not a valid one.
        HubError: one cannot be had.
    """
    found = {}
    pool = ThreadPoolExecutor(CONNECTIONS)
    try:
        with progress("reading headers", len(files), "files") as advance:
            read = {
                name: pool.submit(_header, snapshot.directory / name, file) for name, file in files.items()
            }
            for name, header in read.items():
                found[name] = header.result()
                advance(1)
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def _header(path: Path, file: RemoteFile) -> WeightFile:
    size = min(HEADER_BYTES, file.size)
    first = bytes_of(file, 0, size) if size else b""

    def read(start: int, count: int) -> bytes:
        count = min(count, file.size - start)
        if start + count <= size:
            return first[start : start + count]
        return bytes_of(file, start, count)

    return described(path, file.size, read)
