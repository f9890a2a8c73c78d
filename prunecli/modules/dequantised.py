"""A quantised checkpoint as one of plain weights, decoded while they are read: a few rows at a time."""

from __future__ import annotations

import math
import threading
from functools import cached_property

import torch

from prunecli.errors import UnsupportedModelError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.quantisation import KEYS
from prunecli.model.quantised import values_of
from prunecli.modules.decoders import DECODERS, Parts, Scratch, matrix_rows
from prunecli.modules.filling import DTYPES
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.reader import Handle, Stored

BLOCK_VALUES = 1 << 18
"""Decoded at once, if a row is no longer: what a core's cache holds."""


def as_run(checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    """The checkpoint with its quantised weights as plain ones of the type `dtype`; one without any as it is.

    What is returned reads from `checkpoint`, which must stay open.

    Raises:
        UnsupportedModelError: weights that are stored in a way that is moved, and not decoded.
    """
    if not checkpoint.quantised:
        return checkpoint
    for weight in checkpoint.quantised.values():
        if weight.scheme not in DECODERS:
            raise UnsupportedModelError(
                f"{checkpoint.path}: {weight.name} is quantised by {weight.scheme}, which prunecli moves and does not "
                "read",
                "Run the model before it was quantised; prune-experts --keep or --metric random need no run.",
            )
    return DequantisedCheckpoint(checkpoint, parse_dtype(str(dtype)))


class DequantisedCheckpoint(Checkpoint):
    """See `as_run`."""

    def __init__(self, stored: Checkpoint, dtype: str) -> None:
        self._source, self._weights = stored, stored.quantised
        self._dtype, self._values = DTYPES[dtype], values_of(stored.tensors, stored.quantised, dtype, {})
        self._own = _OfThread()
        super().__init__(stored.path, {k: v for k, v in stored.config.items() if k not in KEYS}, ())
        self.files = stored.files

    @cached_property
    def fingerprint(self) -> str:
        """Of what is stored."""
        return self._source.fingerprint

    @cached_property
    def _by_stored_name(self) -> dict[str, tuple[int, Stored]]:
        return {name: (0, Stored(info, 0)) for name, info in self._values.items()}

    def _equal(self, _one: str, _other: str) -> bool:
        """Of tied tensors, those that are equal are left out by the source."""
        return False

    def stored_bytes(self, name: str) -> int:
        """As the source's; of a quantised weight with its scales and all."""
        weight = self._weights.get(name)
        parts = [name] if weight is None else weight.parts.values()
        return sum(self._source.stored_bytes(part) for part in parts)

    @property
    def is_remote(self) -> bool:
        """As the source."""
        return self._source.is_remote

    def interrupt(self) -> None:
        """See `TensorReader.interrupt`."""
        self._source.interrupt()

    def open_files(self, name: str) -> None:
        """See `TensorReader.open_files`."""
        weight = self._weights.get(name)
        for part in [name] if weight is None else weight.parts.values():
            self._source.open_files(part)

    def location(self, name: str) -> tuple[Handle, int, int]:
        """As the source's; of a quantised weight there is none."""
        if name in self._weights:
            raise self._source.quantised_refusal(name)
        return self._source.location(name)

    def read_range(
        self, name: str, start_byte: int, end_byte: int, buffer: memoryview | bytearray
    ) -> memoryview:
        """Bytes of the decoded values, decoded anew at each call; see `TensorReader.read_range`.

        Raises:
            CheckpointError: as there, or a scale is no number, or 0 where values are not.
        """
        weight = self._weights.get(name)
        if weight is None:
            return self._source.read_range(name, start_byte, end_byte, buffer)
        info = self.info(name)
        if not 0 <= start_byte <= end_byte <= info.nbytes:
            raise ValueError(f"{name} has {info.nbytes} bytes; {start_byte} to {end_byte} were asked for")
        view = memoryview(buffer).cast("B")[: end_byte - start_byte]
        if not len(view):
            return view
        size, columns = self._dtype.itemsize, info.shape[-1]
        first, last = start_byte // size, end_byte // size
        target = torch.frombuffer(view, dtype=self._dtype)
        most = max(BLOCK_VALUES // columns, 1)
        row, done = first // columns, 0
        while done < len(target):
            rows = min(most, math.ceil((last - row * columns) / columns))
            rows = min(rows, matrix_rows(weight) - row % matrix_rows(weight))  # of one expert
            expert, start = divmod(row, matrix_rows(weight))  # all matrices lie one below another
            parts = self._own.at_hand
            if parts is None or parts.weight is not weight or parts.expert != expert:
                parts = self._own.at_hand = Parts(self._source, weight, expert, self._own.scratch)
            decoded = torch.from_numpy(DECODERS[weight.scheme](parts, start, start + rows))
            values = decoded.view(-1)[max(first - row * columns, 0) :]
            count = min(len(values), len(target) - done)
            target[done : done + count].copy_(values[:count])
            row, done = row + rows, done + count
        return view


class _OfThread(threading.local):
    """What each thread that reads has for itself: room, and the parts of the matrix that it is at."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self.at_hand: Parts | None = None
