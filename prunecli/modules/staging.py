"""Parts of tensors on their way from a file to another type, or to a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


class Staging:
    """Room on the host for what is read before it goes where it belongs.

    For a GPU there are two such rooms, in pinned memory: one is read into while the other is copied, and the host waits
    for neither but to read into it again. Copies are of the stream that is current, and values are cast there.

    Args:
        nbytes: the most that is read at a time; taken when it is first needed.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._host: bytearray | None = None
        self._pinned: list[Tensor] = []
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._raw: Tensor | None = None

    def room(self, nbytes: int, device: torch.device) -> memoryview:
        """Where the next `nbytes` are read to."""
        if device.type != "cuda":
            if self._host is None:
                self._host = bytearray(self._nbytes)
            return memoryview(self._host)[:nbytes]
        self._turn = 1 - self._turn
        if not self._pinned:
            self._pinned = [torch.empty(self._nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        view: memoryview = self._pinned[self._turn].numpy().data
        return view[:nbytes]

    def send(self, target: Tensor, dtype: torch.dtype) -> None:
        """Have `target` `[values]` take what was read last, values of the type `dtype`."""
        nbytes = target.numel() * dtype.itemsize
        if target.device.type != "cuda":
            assert self._host is not None
            target.copy_(torch.frombuffer(self._host, dtype=dtype, count=target.numel()))
            return
        read = self._pinned[self._turn][:nbytes]
        if target.dtype == dtype:
            target.copy_(read.view(dtype), non_blocking=True)
        else:
            if self._raw is None or self._raw.device != target.device or len(self._raw) < nbytes:
                self._raw = target.new_empty(nbytes, dtype=torch.uint8)
            raw = self._raw[:nbytes]
            raw.copy_(read, non_blocking=True)
            target.copy_(raw.view(dtype))
        self._copied[self._turn] = torch.cuda.current_stream(target.device).record_event()
