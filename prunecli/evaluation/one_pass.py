"""How long a pass layer by layer over an assumed text takes, by what the machine is measured to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prunecli.model.cost import model_dim, token_products

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.results.inspection import Pass

SENTENCES = 997
SENTENCE_TOKENS = 40
"""The text of a pass: that of FLORES-200 dev, one pair."""

MOST_READ = 1 << 30
READ_SECONDS = 0.8
PRODUCT_SECONDS = 0.5
"""A measurement ends here."""


def measure_pass(checkpoint: Checkpoint, *, sparse: bool) -> Pass:
    """Count the operations, and measure the machine for about two seconds.

    Args:
        sparse: whether gates are collected, without logits; else the model makes them.
    """
    import torch

    from prunecli.evaluation.hardware import device_name
    from prunecli.modules.devices import found_device
    from prunecli.modules.precision import choose_dtype, dtype_name
    from prunecli.modules.speeds import disk_speed, model_speed
    from prunecli.results.inspection import ComputingTime, Pass

    family, count = checkpoint.require_architecture(), checkpoint.layout.sizes.count
    tokens = SENTENCES * SENTENCE_TOKENS
    operations = token_products(checkpoint.layout).operations(tokens, tokens, tokens, output=not sparse)
    disk = disk_speed(checkpoint.files if checkpoint.is_local else (), MOST_READ, READ_SECONDS)
    reading = checkpoint.total_bytes / disk.rate if disk.bytes else 0.0
    widest = max(count(stack.ffn.width) for stack in family.stacks)
    computing = []
    for device in dict.fromkeys((torch.device("cpu"), found_device())):
        dtype = choose_dtype("auto", checkpoint, device)
        speed = model_speed(count(model_dim(family)), widest, dtype, device, PRODUCT_SECONDS).speed
        computing.append(
            ComputingTime(
                device=device_name(device),
                dtype=dtype_name(dtype),
                threads=torch.get_num_threads(),
                operations_per_second=speed,
                computing_seconds=operations / speed,
                seconds=max(reading, operations / speed),  # the two overlap
            )
        )
    return Pass(
        sentences=SENTENCES,
        sentence_tokens=SENTENCE_TOKENS,
        pairs=1,
        bytes=checkpoint.total_bytes,
        operations=operations,
        disk_bytes_per_second=disk.rate,
        from_disk=disk.from_disk,
        reading_seconds=reading,
        computing=computing,
    )
