"""Weights read ahead by one thread into buffers that are used again and again."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

import torch
from torch import Tensor

from prunecli.model.checkpoint import Checkpoint
from prunecli.modules.filling import CHUNK_BYTES, read_into
from prunecli.modules.staging import Staging
from prunecli.running.layerwise.copying import CopyStream
from prunecli.running.layerwise.parts import Block, Spec


@dataclass(frozen=True)
class Loaded:
    """A block in its buffer: tensors in the order of the block."""

    block: Block
    tensors: tuple[Tensor, ...]
    buffer: Tensor


class Reader:
    """Blocks of weights, read in the order in which they are asked for; a context manager that ends its thread.

    A block waits for a free buffer, so that no more than `buffers` are ever held.

    Args:
        checkpoint: nobody else reads from it meanwhile.
        buffers: at least 2.
        buffer_bytes: of the largest block.
        device: where the blocks go.

    Attributes:
        bytes_read: from the checkpoint, so far.
    """

    def __init__(self, checkpoint: Checkpoint, buffers: int, buffer_bytes: int, device: torch.device) -> None:
        self.bytes_read = 0
        self._checkpoint = checkpoint
        self._wanted: SimpleQueue[Block | None] = SimpleQueue()
        self._free: SimpleQueue[Tensor | None] = SimpleQueue()
        self._ready: SimpleQueue[Loaded | BaseException] = SimpleQueue()
        self._ended = threading.Event()
        self._copies = CopyStream(device)
        for _ in range(buffers):
            buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
            self._copies.leave(buffer)  # which may have been another tensor, at work still
            self._free.put(buffer)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._work, name="reader", daemon=True)
        threads = torch.get_num_threads()
        self._thread.start()
        self._started.wait()
        torch.set_num_threads(threads)  # a thread's setting is also the default of threads to come

    def want(self, block: Block) -> None:
        """Ask for a block, after those that were asked for before."""
        self._wanted.put(block)

    def take(self) -> Loaded:
        """The next block, as soon as it is there.

        Raises:
            CheckpointError: it cannot be read.
        """
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        self._copies.use(found.buffer)
        return found

    def give_back(self, loaded: Loaded) -> None:
        """Have the buffer used for another block."""
        self._copies.leave(loaded.buffer)
        self._free.put(loaded.buffer)

    def close(self) -> None:
        """End the thread, whatever it is at."""
        self._ended.set()
        self._wanted.put(None)
        self._free.put(None)
        self._thread.join()
        self._copies.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # see modules.threads
        self._started.set()
        try:
            with torch.no_grad():
                self._serve()
        except BaseException as error:  # whatever it is, it belongs to who waits for the block
            self._ready.put(error)

    def _serve(self) -> None:
        staging = Staging(CHUNK_BYTES)
        while not self._ended.is_set():
            block = self._wanted.get()
            buffer = self._free.get()
            if block is None or buffer is None:
                return
            tensors = place_tensors(block, buffer)
            with self._copies.into(buffer):
                for spec, tensor in zip(block, tensors, strict=True):
                    if self._ended.is_set():
                        return
                    self.bytes_read += read_spec(tensor, self._checkpoint, spec, staging)
            self._ready.put(Loaded(block, tensors, buffer))


def read_spec(tensor: Tensor, checkpoint: Checkpoint, spec: Spec, staging: Staging) -> int:
    """Read what belongs into `tensor`, a buffer's; returns the bytes that it takes in the checkpoint.

    Raises:
        CheckpointError: as `read_into`.
    """
    start = nbytes = 0
    for name in (spec.name, *spec.more):
        info = checkpoint.info(name)
        if spec.entry is not None:
            read_into(tensor, checkpoint, name, staging, spec.entry)
            nbytes += checkpoint.stored_bytes(name) // info.shape[0]
            continue
        rows = info.shape[0] if spec.more else None
        read_into(tensor if rows is None else tensor[start : start + rows], checkpoint, name, staging)
        start, nbytes = start + (rows or 0), nbytes + checkpoint.stored_bytes(name)
    return nbytes


def place_tensors(block: Block, buffer: Tensor) -> tuple[Tensor, ...]:
    """The block's tensors, one after another in `buffer`."""
    found = []
    start = 0
    for spec in block:
        size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
        found.append(buffer[start : start + size].view(spec.dtype).view(spec.shape))
        start += spec.nbytes
    return tuple(found)
