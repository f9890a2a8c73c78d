"""Writes safetensors files as a stream: every size is known beforehand, a few blocks are in memory at a time."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prunecli.progress import Progress, silent
from prunecli.tensors.copying import JOB_BYTES, Gather, Move, gathered, reserve
from prunecli.tensors.dtypes import itemsize
from prunecli.tensors.reader import TensorReader
from prunecli.tensors.stream import Block, Copy, Output, blocks, check_expressions, copied_ranges
from prunecli.tensors.transaction import Journal, digest

SHARD_BYTES = 5_000_000_000
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

THREADS = 4
"""Casts are bound by the processor, plain copies by the memory; neither gains from many more."""

CONNECTIONS = 8
"""Requests side by side to where files are that are elsewhere."""

NOTE_BYTES = 256 << 20
"""After so many more bytes of a file the journal notes how far it is."""


def write_tensors(
    source: TensorReader,
    outputs: Sequence[Output],
    directory: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    journal: Journal | None = None,
    progress: Progress = silent,
) -> dict[str, str]:
    """Write `outputs` into `directory`: one file, or shards of at most `shard_bytes` with an index.

    Equal types are copied, neighbours in the source at once; others are cast block by block, each value rounded
    to the nearest, ties to even; what is made of several tensors is computed block by block. The bytes depend on
    nothing but the arguments.

    Args:
        source: what the outputs are made of.
        outputs: in the order of the result.
        directory: to write into.
        shard_bytes: size of a file at most.
        journal: of `directory`: what it notes is not written again, and what is written is noted.
        progress: advances by the bytes that are written.

    Returns:
        Tensor's name -> file.

    Raises:
        CheckpointError: a source tensor is missing or cut short, or a value cannot be cast.
        HubError: what is elsewhere cannot be had.
        OSError: the disk is full, among others.
    """
    check_expressions(source, outputs)
    journal = journal or Journal(directory, None)
    shards = shards_of(outputs, shard_bytes)
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = [SINGLE_FILE]
    weight_map = {output.name: file for file, shard in zip(names, shards, strict=True) for output in shard}
    verb = "fetching" if source.is_remote else "writing"
    with progress(verb, sum(output.nbytes for output in outputs), "bytes") as advance:
        for file, shard in zip(names, shards, strict=True):
            if journal.has(file):
                advance(sum(output.nbytes for output in shard))
                continue
            _write_shard(source, shard, directory / file, advance, journal)
            journal.note(file, (directory / file).stat().st_size)
    if count > 1:
        index = {
            "metadata": {
                "total_parameters": sum(output.info.numel for output in outputs),
                "total_size": sum(output.nbytes for output in outputs),
            },
            "weight_map": dict(sorted(weight_map.items())),
        }
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return weight_map


def shards_of(outputs: Sequence[Output], shard_bytes: int) -> list[list[Output]]:
    """Cut in order; a shard is over the limit only where one tensor is."""
    shards: list[list[Output]] = [[]]
    nbytes = 0
    for output in outputs:
        more = output.nbytes
        if shards[-1] and nbytes + more > shard_bytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(output)
        nbytes += more
    return shards


def in_place(outputs: Sequence[Output]) -> Sequence[Output]:
    """The order in which they lie in a file, such that each begins at a multiple of its type's size.

    It is the given one where that does: neighbours in the source then stay neighbours, a quantised matrix and its
    scales among them. Else wide types come first, as the safetensors library has them.
    """
    start = 0
    for output in outputs:
        if start % itemsize(output.dtype):
            return sorted(outputs, key=lambda output: -itemsize(output.dtype))
        start += output.nbytes
    return outputs


def header_bytes(outputs: Sequence[Output], metadata: Mapping[str, str] = {"format": "pt"}) -> bytes:
    """The length and the JSON that a safetensors file of these tensors begins with, padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for output in outputs:
        end = offset + output.nbytes
        header[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_shard(
    source: TensorReader,
    shard: Sequence[Output],
    path: Path,
    advance: Callable[[float], None],
    journal: Journal,
) -> None:
    ordered = in_place(shard)
    head = header_bytes(ordered)
    with path.open("r+b" if path.name in journal.records else "wb", buffering=0) as file:
        reserve(file.fileno(), len(head) + sum(output.nbytes for output in ordered))
        file.write(head)
        moves: list[Move] = []
        computed: list[Block] = []
        target, place = file.fileno(), len(head)
        for output in ordered:
            ranges = copied_ranges(source, output)
            if ranges is None:
                computed += blocks(source, output, target, place)
                place += output.nbytes
                continue
            assert isinstance(output.expression, Copy)
            handle, offset, _ = source.location(output.expression.source)
            where = f"{source.path}: {output.expression.source}"
            for first, stop in ranges:
                for start in range(first, stop, JOB_BYTES):
                    nbytes = min(JOB_BYTES, stop - start)
                    moves.append(Move(where, handle, offset + start, nbytes, target, place))
                    place += nbytes
        # Work that may be done side by side, in the order of the file.
        jobs: list[Gather | Block] = sorted([*gathered(moves), *computed], key=lambda job: job.target_offset)
        pool = ThreadPoolExecutor(CONNECTIONS if source.is_remote else min(THREADS, os.cpu_count() or 1))
        try:
            places = [
                [one.target_offset for one in (job.moves if isinstance(job, Gather) else (job,))]
                for job in jobs
            ]
            # It differs if other files of the source lie here already.
            layout = digest([places, [job.written for job in jobs]])
            done = journal.steps(path.name, layout)
            nbytes = noted = sum(job.written for job in jobs[:done])
            advance(nbytes)
            submitted = [pool.submit(job.carry_out) for job in jobs[done:]]
            for number, (job, work) in enumerate(zip(jobs[done:], submitted, strict=True), start=done + 1):
                work.result()
                nbytes += job.written
                advance(job.written)
                if nbytes - noted >= NOTE_BYTES:
                    journal.note(path.name, nbytes, number, layout)
                    noted = nbytes
        finally:  # after an error or Ctrl-C: what runs ends within one move, the rest never starts
            pool.shutdown(cancel_futures=True)
