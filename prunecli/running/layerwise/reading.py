"""Weights read, and decoded, ahead by threads of their own into buffers that are used again and again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import LifoQueue, Queue, SimpleQueue

import torch
from torch import Tensor

from prunecli.model.checkpoint import Checkpoint
from prunecli.modules.filling import CHUNK_BYTES, Staging, read_into
from prunecli.running.layerwise.parts import Block, Spec

MOST_READERS = 4
"""Threads that read, where there are as many to compute: to decode or cast takes as long as to multiply by few rows."""


class CopyStream:
    """A stream of copies into buffers that another thread computes with; nothing at all where `device` is no GPU.

    Of each buffer the last that was done to it is known as an event, for which the other stream waits before it does
    anything to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._last: dict[int, torch.cuda.Event] = {}

    @contextmanager
    def into(self, buffer: Tensor) -> Iterator[None]:
        """Inside, this thread's work is the copies' stream's, after all that was computed with `buffer`."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._last[buffer.data_ptr()])
            yield
            self._last[buffer.data_ptr()] = self._stream.record_event()

    def use(self, buffer: Tensor) -> None:
        """What this thread computes from now on comes after the copies into `buffer`."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last[buffer.data_ptr()])

    def leave(self, buffer: Tensor) -> None:
        """What this thread has computed so far comes before further copies into `buffer`."""
        if self._stream is not None:
            self._last[buffer.data_ptr()] = torch.cuda.current_stream(self._device).record_event()

    def close(self) -> None:
        """What comes into the buffers' memory after them comes after all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


@dataclass(frozen=True)
class Loaded:
    """A block in its buffer: tensors in the order of the block; `stored_bytes` of the checkpoint were read for it."""

    block: Block
    tensors: tuple[Tensor, ...]
    buffer: Tensor
    stored_bytes: int


class Reader:
    """Blocks of weights, had in the order in which they are asked for; a context manager that ends its threads.

    A block waits for a free buffer, so that no more than `buffers` are ever held.

    Args:
        checkpoint: nobody else reads from it meanwhile.
        buffers: at least 2.
        buffer_bytes: of the largest block.
        device: where the blocks go.

    Attributes:
        bytes_read: from the checkpoint, for all blocks that were taken.
    """

    def __init__(self, checkpoint: Checkpoint, buffers: int, buffer_bytes: int, device: torch.device) -> None:
        self.bytes_read = 0
        self._checkpoint = checkpoint
        self._wanted: SimpleQueue[tuple[Block, Future[Loaded]] | None] = SimpleQueue()
        # On a CPU the last one that was used is in its cache; on a GPU what computed with it may be at work still.
        self._free: Queue[Tensor | None] = LifoQueue() if device.type == "cpu" else Queue()
        self._asked: deque[Future[Loaded]] = deque()
        self._in_order, self._opening = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self._copies = CopyStream(device)
        for _ in range(buffers):
            buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
            self._copies.leave(buffer)  # which may have been another tensor, at work still
            self._free.put(buffer)
        threads = torch.get_num_threads()
        count = min(MOST_READERS, threads) if device.type == "cpu" else 1
        started = threading.Barrier(count + 1)
        self._threads = [
            threading.Thread(target=self._work, args=(started,), name="reader", daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()
        started.wait()
        torch.set_num_threads(threads)  # a thread's setting is also the default of threads to come

    def want(self, block: Block) -> None:
        """Ask for a block, after those that were asked for before."""
        found: Future[Loaded] = Future()
        self._asked.append(found)
        self._wanted.put((block, found))

    def take(self) -> Loaded:
        """The next block, as soon as it is there.

        Raises:
            CheckpointError: it cannot be read.
        """
        loaded = self._asked.popleft().result()
        self._copies.use(loaded.buffer)
        self.bytes_read += loaded.stored_bytes
        return loaded

    def give_back(self, loaded: Loaded) -> None:
        """Have the buffer used for another block."""
        self._copies.leave(loaded.buffer)
        self._free.put(loaded.buffer)

    def close(self) -> None:
        """End the threads, whatever they are at."""
        self._ended.set()
        for _ in self._threads:
            self._wanted.put(None)
            self._free.put(None)
        for thread in self._threads:
            thread.join()
        self._copies.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _work(self, started: threading.Barrier) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # see modules.grouped
        started.wait()
        torch.set_grad_enabled(False)
        staging = Staging(CHUNK_BYTES)
        while not self._ended.is_set():
            with self._in_order:  # or a later block might have the last buffer that an earlier one waits for
                asked, buffer = self._wanted.get(), self._free.get()
            if asked is None or buffer is None:
                return
            block, found = asked
            try:
                found.set_result(self._load(block, buffer, staging))
            except BaseException as error:  # whatever it is, it belongs to who waits for the block
                found.set_exception(error)

    def _load(self, block: Block, buffer: Tensor, staging: Staging) -> Loaded:
        with self._opening:  # its files, one thread at a time
            for spec in block:
                for name in (spec.name, *spec.more):
                    self._checkpoint.open_files(name)
        tensors, nbytes = place_tensors(block, buffer), 0
        with self._copies.into(buffer):
            for spec, tensor in zip(block, tensors, strict=True):
                if self._ended.is_set():
                    break  # nobody waits any more
                nbytes += read_spec(tensor, self._checkpoint, spec, staging)
        return Loaded(block, tensors, buffer, nbytes)


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
