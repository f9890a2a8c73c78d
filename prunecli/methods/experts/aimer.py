"""AIMER: the value of experts by their weights alone, in one pass over the files, a few blocks in memory at a time.

It needs no text and runs no model, and so serves layers that no plain forward pass enters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import CheckpointError, StatisticsError
from prunecli.methods.experts.metrics import AIMER, RANDOM
from prunecli.model.axes import axis_name
from prunecli.model.sparse_layer import SparseLayer
from prunecli.progress import Progress, silent
from prunecli.tensors.dtypes import itemsize, numpy_dtype
from prunecli.tensors.reader import TensorReader

if TYPE_CHECKING:
    from prunecli.methods.experts.options import ExpertOptions
    from prunecli.model.checkpoint import Checkpoint

BLOCK_ELEMENTS = 1 << 18
"""Values that are read and summed at a time; sums depend on it in their last bits."""
THREADS = 8
PLAIN = ("F16", "BF16", "F32", "F64")
"""Types of weights that are no codes."""


@dataclass(frozen=True)
class Part:
    """A run of values of one tensor: an expert's own, or its entry in one that holds all experts."""

    tensor: str
    first: int
    values: int


def aimer_bytes(checkpoint: Checkpoint, options: ExpertOptions) -> int:
    """Bytes that the choice with these options reads of the experts' weights, before anything is written.

    Raises:
        StatisticsError: as `aimer_values`.
    """
    if options.keep is not None or options.metric == RANDOM:
        return 0
    pruned = [
        layer
        for layer in checkpoint.require_mixtures()
        if not (layer.is_predicting and options.mtp == "drop")
    ]
    reader, read = plain(
        checkpoint, [layer for layer in pruned if options.metric == AIMER or layer.is_predicting]
    )
    names = {part.tensor for layer in read for parts in _work(reader, layer) for part in parts}
    return sum(reader.stored_bytes(name) for name in names)


def plain(checkpoint: Checkpoint, layers: Sequence[SparseLayer]) -> tuple[Checkpoint, list[SparseLayer]]:
    """The checkpoint, and its layers, with quantised weights decoded; one without any as it is.

    Raises:
        UnsupportedModelError: they cannot be.
    """
    if not layers or not checkpoint.quantised:
        return checkpoint, list(layers)
    import torch

    from prunecli.modules.dequantised import as_run

    decoded = as_run(checkpoint, torch.float32)
    found = {layer.name: layer for layer in decoded.mixtures}
    return decoded, [found[layer.name] for layer in layers]


def aimer_values(
    checkpoint: Checkpoint,
    layers: Sequence[SparseLayer],
    *,
    threads: int | None = None,
    progress: Progress = silent,
) -> dict[str, NDArray[np.float64]]:
    """Name of the axis -> `[original experts]`, 1 / AIMER of each expert that it holds, so that the lowest goes first.

    AIMER(e) = (sum |w| / N) / sqrt(sum w² / N) over the N weights of an expert's projections, biases left out; experts
    with the highest are pruned. It is 1 where all weights are of one size, sqrt(2 / pi) of normal ones, and less the
    more of the norm lies on few weights. An expert of zeros alone has the value 0.

    Args:
        checkpoint: of the weights; quantised ones count as what they stand for.
        layers: its mixtures.
        threads: that read and sum, 5 MiB each; how many changes no bit. None: one per core, at most THREADS, and
            these where weights come from elsewhere.

    Raises:
        StatisticsError, UnsupportedModelError: the weights are quantised in a way that is not read.
        CheckpointError: a file ends early, or holds what is no number.
    """
    reader, layers = plain(checkpoint, layers)
    if threads is None:
        threads = THREADS if reader.is_remote else min(THREADS, os.cpu_count() or 1)
    found = {axis_name(layer.name, "expert"): np.zeros(layer.original_experts) for layer in layers}
    places = [(axis_name(layer.name, "expert"), expert) for layer in layers for expert in layer.experts]
    work = [parts for layer in layers for parts in _work(reader, layer)]
    for parts in work:
        for part in parts:
            reader.open_files(part.tensor)
    pool = ThreadPoolExecutor(threads)
    try:
        with progress("reading experts", len(work), "experts") as advance:
            waiting = [pool.submit(inverse_aimer, reader, parts) for parts in work]
            for (name, expert), value in zip(places, waiting, strict=True):
                found[name][expert] = value.result()
                advance(1)
    except BaseException:
        reader.interrupt()
        raise
    finally:  # after an error or Ctrl-C: what runs ends with its expert, the rest never starts
        pool.shutdown(cancel_futures=True)
    return found


def _work(reader: TensorReader, layer: SparseLayer) -> Iterator[list[Part]]:
    """The weights of each expert of a layer."""
    for place in range(layer.num_experts):
        own = [layer.expert_tensor(place, suffix) for suffix in layer.expert_tensors]
        yield parts_of_expert(reader, own, layer.stacked_tensors, place, layer.num_experts)


def parts_of_expert(
    reader: TensorReader, own: Sequence[str], stacked: Sequence[str] = (), place: int = 0, held: int = 1
) -> list[Part]:
    """Where the weights of an expert lie, biases left out.

    Args:
        reader: of the weights.
        own: full names of the tensors of this expert alone.
        stacked: full names of those of all experts, with as many entries for each on the first axis.
        place: its number in those.
        held: how many experts there are.

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
        shape = info.shape
        if name in stacked:
            shape = shape[1:] if shape[0] == held else (shape[0] // held, *shape[1:])
        if len(shape) > 1:
            values = math.prod(shape)
            parts.append(Part(name, place * values if name in stacked else 0, values))
    return parts


def inverse_aimer(reader: TensorReader, parts: Sequence[Part]) -> float:
    """sqrt(N sum w²) / sum |w| over all values of the parts; 0 where all are 0.

    Raises:
        CheckpointError: a file ends early, or holds what is no number.
    """
    count, absolute, square = 0, 0.0, 0.0
    for part in parts:
        dtype = reader.info(part.tensor).dtype
        size = itemsize(dtype)
        with reader.reading(part.tensor, part.first * size, part.values * size) as fill:
            for start in range(0, part.values, BLOCK_ELEMENTS):
                raw = np.empty(min(BLOCK_ELEMENTS, part.values - start), numpy_dtype(dtype))
                fill(raw.view(np.uint8).data)
                block = np.abs(raw.astype(np.float64))
                absolute += float(block.sum())
                square += float(np.square(block, out=block).sum())
        count += part.values
        if not (math.isfinite(absolute) and math.isfinite(square)):
            raise CheckpointError(f"{reader.path}: {part.tensor} holds NaN or infinity, or values too large")
    return math.sqrt(count * square) / absolute if absolute else 0.0
