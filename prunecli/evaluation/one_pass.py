"""How long a pass layer by layer over an assumed text takes, by what the machine is measured to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prunecli.model.cost import model_dim, token_products

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.modules.speeds import Multiplying, Reading
    from prunecli.results.inspection import Pass

SENTENCES = 997
SENTENCE_TOKENS = 40
"""The text of a pass: that of FLORES-200 dev, one pair."""

MOST_READ = 1 << 30
READ_SECONDS = 0.8
PRODUCT_SECONDS = 0.5
"""A measurement ends here."""


@dataclass(frozen=True)
class Computing:
    """Matrix products on a device, as measured."""

    device: str
    dtype: str
    threads: int
    measured: Multiplying


@dataclass(frozen=True)
class OnePass:
    """A pass of the assumed text, layer by layer.

    Attributes:
        bytes: of weights, each read once.
        operations: of its matrix products.
        disk: as measured.
        computing: by device.
    """

    bytes: int
    operations: int
    disk: Reading
    computing: tuple[Computing, ...]

    @property
    def reading_seconds(self) -> float:
        """At the measured speed of the disk."""
        return self.bytes / self.disk.rate if self.disk.bytes else 0.0

    def computing_seconds(self, on: Computing) -> float:
        """At the measured speed of matrix products."""
        return self.operations / on.measured.speed

    def seconds(self, on: Computing) -> float:
        """The larger of both, since they overlap."""
        return max(self.reading_seconds, self.computing_seconds(on))


def measure_pass(checkpoint: Checkpoint, *, sparse: bool) -> OnePass:
    """Count the operations, and measure the machine for about two seconds.

    Args:
        sparse: whether gates are collected, without logits; else the model makes them.
    """
    from prunecli.modules.speeds import disk_speed

    tokens = SENTENCES * SENTENCE_TOKENS
    products = token_products(checkpoint.layout)
    return OnePass(
        checkpoint.total_bytes,
        products.operations(tokens, tokens, tokens, output=not sparse),
        disk_speed(checkpoint.files if checkpoint.is_local else (), MOST_READ, READ_SECONDS),
        tuple(_computing(checkpoint)),
    )


def _computing(checkpoint: Checkpoint) -> Iterator[Computing]:
    import torch

    from prunecli.evaluation.hardware import device_name
    from prunecli.modules.devices import found_device
    from prunecli.modules.precision import choose_dtype, dtype_name
    from prunecli.modules.speeds import model_speed

    family = checkpoint.require_architecture()
    width = checkpoint.layout.sizes.count(model_dim(family))
    widest = max(checkpoint.layout.sizes.count(stack.ffn.width) for stack in family.stacks)
    for device in dict.fromkeys((torch.device("cpu"), found_device())):
        dtype = choose_dtype("auto", checkpoint, device)
        measured = model_speed(width, widest, dtype, device, PRODUCT_SECONDS)
        yield Computing(device_name(device), dtype_name(dtype), torch.get_num_threads(), measured)


def pass_document(single: OnePass) -> Pass:
    """All of it, as `inspect --json` prints it."""
    from prunecli.results.inspection import ComputingTime, Pass

    return Pass(
        sentences=SENTENCES,
        sentence_tokens=SENTENCE_TOKENS,
        pairs=1,
        bytes=single.bytes,
        operations=single.operations,
        disk_bytes_per_second=single.disk.rate,
        from_disk=single.disk.from_disk,
        reading_seconds=single.reading_seconds,
        computing=[
            ComputingTime(
                device=on.device,
                dtype=on.dtype,
                threads=on.threads,
                operations_per_second=on.measured.speed,
                computing_seconds=single.computing_seconds(on),
                seconds=single.seconds(on),
            )
            for on in single.computing
        ],
    )
