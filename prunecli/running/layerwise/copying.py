"""Copies to a GPU beside what it computes, in an order that both keep to without the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
