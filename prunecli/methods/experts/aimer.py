"""AIMER: the value of experts by their weights alone, in one pass over the files, a few blocks in memory at a time.

It needs no text and runs no model, and so serves layers that no plain forward pass enters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import CheckpointError, StatisticsError
from prunecli.methods.experts.metrics import AIMER, RANDOM
from prunecli.model.axes import axis_name
from prunecli.model.sparse_layer import SparseLayer, parts_of
from prunecli.progress import Progress, silent
from prunecli.tensors.dtypes import itemsize, numpy_dtype
from prunecli.tensors.reader import TensorReader

if TYPE_CHECKING:
    from prunecli.methods.experts.options import ExpertOptions
    from prunecli.model.checkpoint import Checkpoint

BLOCK_ELEMENTS = 1 << 18
"""Values that are read and summed at a time; sums depend on it in their last bits."""
THREADS = 8
"""Largest number of threads that read and sum, 5 MiB each; the number changes no bit."""
PLAIN = ("F16", "BF16", "F32", "F64")
"""Types of weights that are no codes."""


Part = tuple[str, int, int]
"""Values of one tensor: its name, the first value, the number of values."""


def aimer_bytes(checkpoint: Checkpoint, options: ExpertOptions) -> int:
    """Bytes of experts that `plan_experts` reads with these options."""
    if options.keep is not None or options.metric == RANDOM:
        return 0
    read = tuple(
        layer
        for layer in checkpoint.require_mixtures()
        if (options.mtp == "prune" if layer.is_predicting else options.metric == AIMER)
    )
    return sum(checkpoint.stored_bytes(name) for name, part in parts_of(read) if part == "experts")


def aimer_values(
    checkpoint: Checkpoint, layers: Sequence[SparseLayer], *, progress: Progress = silent
) -> dict[str, NDArray[np.float64]]:
    """Name of the axis -> `[original experts]`, 1 / AIMER of each expert that it holds, so that the lowest goes first.

    AIMER(e) = (sum |w| / N) / sqrt(sum w² / N) over the N weights of an expert's projections, biases left out; experts
    with the highest are pruned. It is 1 where all weights are of one size, sqrt(2 / pi) of normal ones, and less the
    more of the norm lies on few weights. An expert of zeros alone has the value 0.

    Args:
        checkpoint: the weights; quantised weights count as the numbers that they stand for.
        layers: mixtures of the checkpoint.

    Raises:
        StatisticsError, UnsupportedModelError: the weights are quantised in an unknown way.
        CheckpointError: a file ends early, or holds NaN or infinity.
    """
    reader = checkpoint
    if layers and checkpoint.quantised:
        import torch

        from prunecli.modules.dequantised import as_run

        reader = as_run(checkpoint, torch.float32)
        decoded = {layer.name: layer for layer in reader.mixtures}
        layers = [decoded[layer.name] for layer in layers]
    found = {axis_name(layer.name, "expert"): np.zeros(layer.original_experts) for layer in layers}
    places = [(axis_name(layer.name, "expert"), expert) for layer in layers for expert in layer.experts]
    work = [parts for layer in layers for parts in parts_of_layer(reader, layer)]
    for parts in work:
        for name, *_ in parts:
            reader.open_files(name)
    pool = ThreadPoolExecutor(THREADS if reader.is_remote else min(THREADS, os.cpu_count() or 1))
    try:
        with progress("reading experts", len(work), "experts") as advance:
            values = pool.map(partial(inverse_aimer, reader), work)
            for (name, expert), value in zip(places, values, strict=True):
                found[name][expert] = value
                advance(1)
    except BaseException:
        reader.interrupt()
        raise
    finally:  # after an error or Ctrl-C: running threads finish their expert, the rest never starts
        pool.shutdown(cancel_futures=True)
    return found


def parts_of_layer(reader: TensorReader, layer: SparseLayer) -> list[list[Part]]:
    """Where the weights of each expert of a layer are."""
    return [
        parts_of_expert(
            reader,
            [layer.expert_tensor(place, suffix) for suffix in layer.expert_tensors],
            layer.stacked_tensors,
            place,
        )
        for place in range(layer.num_experts)
    ]


def parts_of_expert(
    reader: TensorReader, own: Sequence[str], stacked: Sequence[str] = (), place: int = 0
) -> list[Part]:
    """Where the weights of an expert lie, biases left out.

    Args:
        reader: of the weights.
        own: full names of the tensors of this expert alone.
        stacked: full names of those of all experts, with one entry for each on the first axis.
        place: its number in those.

    Raises:
        StatisticsError: they are quantised.
    """
    parts = []
    for name in (*own, *stacked):
        info = reader.info(name)
        if info.dtype not in PLAIN:
            raise StatisticsError(
                f"{reader.path}: {name} is quantised ({info.dtype}); aimer takes weights as they are.",
                "Choose a metric of gate statistics, or give the model before it was quantised.",
            )
        shape = info.shape[1:] if name in stacked else info.shape
        if len(shape) > 1:
            values = math.prod(shape)
            parts.append((name, place * values if name in stacked else 0, values))
    return parts


def inverse_aimer(reader: TensorReader, parts: Sequence[Part]) -> float:
    """sqrt(N sum w²) / sum |w| over all values of the parts; 0 where all are 0.

    Raises:
        CheckpointError: a file ends early, or holds what is no number.
    """
    count, absolute, square = 0, 0.0, 0.0
    for name, first, values in parts:
        dtype = reader.info(name).dtype
        size = itemsize(dtype)
        with reader.reading(name, first * size, values * size) as fill:
            for start in range(0, values, BLOCK_ELEMENTS):
                raw = np.empty(min(BLOCK_ELEMENTS, values - start), numpy_dtype(dtype))
                fill(raw.view(np.uint8).data)
                block = np.abs(raw.astype(np.float64))
                absolute += float(block.sum())
                square += float(np.square(block, out=block).sum())
        count += values
        if not (math.isfinite(absolute) and math.isfinite(square)):
            raise CheckpointError(f"{reader.path}: {name} holds NaN or infinity, or values too large")
    return math.sqrt(count * square) / absolute if absolute else 0.0
