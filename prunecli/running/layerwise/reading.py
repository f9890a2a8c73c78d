"""Weights read, and decoded, ahead by threads of their own into buffers that are used again and again."""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor

from prunecli.model.checkpoint import Checkpoint
from prunecli.modules.filling import Block, Staging, read_spec
from prunecli.modules.grouped import lone_threads
from prunecli.tensors.reader import Closing

MOST_READERS = 4
"""Threads that read, where there are as many to compute: to decode or cast takes as long as to multiply by few rows."""


Loaded = tuple[tuple[Tensor, ...], Tensor, int]


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
        """Make this thread's further work wait for the copies into `buffer`."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last[buffer.data_ptr()])

    def leave(self, buffer: Tensor) -> None:
        """Make further copies into `buffer` wait for this thread's work so far."""
        if self._stream is not None:
            self._last[buffer.data_ptr()] = torch.cuda.current_stream(self._device).record_event()

    def close(self) -> None:
        """Make later uses of the buffers' memory wait for all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Reader(Closing):
    """Blocks of weights, read in the order in which they are asked for.

    A block waits for a free buffer, so that no more than `buffers` are ever held. One thread alone calls the methods.

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
        self._checkpoint, self._on_cpu = checkpoint, device.type == "cpu"
        self._wanted: deque[Block] = deque()
        self._begun: deque[Future[Loaded]] = deque()
        self._free: deque[Tensor] = deque()
        self._ended = threading.Event()
        self._copies, self._of_thread = CopyStream(device), threading.local()
        for _ in range(buffers):
            buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
            self._copies.leave(buffer)  # which may have been another tensor, at work still
            self._free.append(buffer)
        self._pool = lone_threads(min(MOST_READERS, torch.get_num_threads()), "reader")

    def want(self, block: Block) -> None:
        """Ask for a block, after those that were asked for before."""
        self._wanted.append(block)
        self._begin()

    @contextmanager
    def next_block(self) -> Iterator[tuple[Tensor, ...]]:
        """The tensors of the next block that was asked for; after the `with` block their buffer is used for another.

        Raises:
            CheckpointError: it cannot be read.
        """
        tensors, buffer, stored_bytes = self._begun.popleft().result()
        self._copies.use(buffer)
        self.bytes_read += stored_bytes
        yield tensors
        self._copies.leave(buffer)
        self._free.append(buffer)
        self._begin()

    def close(self) -> None:
        """End the threads, each after the tensor that it reads."""
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)
        self._copies.close()

    def _begin(self) -> None:
        """Read as many blocks as there are free buffers."""
        while self._wanted and self._free:
            # On a CPU the last buffer that was used is in its cache; a GPU may still compute with it.
            buffer = self._free.pop() if self._on_cpu else self._free.popleft()
            self._begun.append(self._pool.submit(self._load, self._wanted.popleft(), buffer))

    @torch.no_grad()
    def _load(self, block: Block, buffer: Tensor) -> Loaded:
        """Read the tensors of `block` into `buffer`; returns both, and the bytes that they take in the checkpoint."""
        staging = self._of_thread.__dict__.setdefault("staging", Staging())
        tensors = []
        start = stored_bytes = 0
        with self._copies.into(buffer):
            for spec in block:
                if self._ended.is_set():
                    break
                size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
                tensors.append(buffer[start : start + size].view(spec.dtype).view(spec.shape))
                stored_bytes += read_spec(tensors[-1], self._checkpoint, spec, staging)
                start += spec.nbytes
        return tuple(tensors), buffer, stored_bytes
