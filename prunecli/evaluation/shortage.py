"""What to do about a model that does not fit: the options that would, with their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prunecli.errors import MemoryShortError, Shortage
from prunecli.tensors.quantities import bytes_text

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

LAYERS_SHARE = 0.8
"""Part of the free memory that `--memory` is advised to take."""


def remedy(error: MemoryShortError) -> str:
    """One line: a smaller type, layer by layer, fewer experts, whichever fit; else the error's own."""
    from prunecli.model.checkpoint import open_model

    shortage = error.shortage
    with open_model(shortage.checkpoint) as checkpoint:
        ways = list(_ways(checkpoint, shortage))
        said = f"What fits: {'; '.join(ways)}." if ways else str(error.remedy)
        if checkpoint.family is None:
            return said
    return f"{said} More: prunecli inspect {shortage.checkpoint} --fit {option_size(shortage.free)}"


def _ways(checkpoint: Checkpoint, shortage: Shortage) -> Iterator[str]:
    import torch

    from prunecli.evaluation.capacity import layers_in
    from prunecli.model.cost import weight_bytes
    from prunecli.modules.fitting import FREE_SHARE
    from prunecli.modules.precision import COMPUTE
    from prunecli.tensors.dtypes import parse_dtype

    weights = weight_bytes(checkpoint, parse_dtype(shortage.dtype))
    if not shortage.trains and weights <= FREE_SHARE * shortage.free:
        yield "a smaller batch or beam"
    if shortage.dtype == "float32" and not shortage.trains:
        smaller = weight_bytes(checkpoint, "BF16")
        if smaller <= shortage.room:
            yield f"--dtype bfloat16 ({bytes_text(smaller)})"
    if checkpoint.family is None or shortage.dtype == "int8":
        return
    if shortage.by_layer and not checkpoint.runs_stock:
        memory = int(LAYERS_SHARE * (shortage.one_free or shortage.free))
        way, _ = layers_in(checkpoint, shortage.free, torch.device(shortage.device), COMPUTE[shortage.dtype])
        if way.needed_bytes <= memory:
            yield f"{shortage.by_layer} {option_size(memory)}"
    yield from _pruned(checkpoint, shortage)


def _pruned(checkpoint: Checkpoint, shortage: Shortage) -> Iterator[str]:
    """The smallest ratio of experts to remove, in 16 bits where the weights are not trained."""
    from prunecli.methods.experts.budget import MARGIN, nearest_ratio
    from prunecli.methods.experts.options import ExpertOptions, request_of
    from prunecli.model.cost import Load, stored_dtype
    from prunecli.tensors.dtypes import config_dtype, itemsize, parse_dtype

    if not checkpoint.mixtures or checkpoint.has_constants:
        return
    stored, dtype = stored_dtype(checkpoint), parse_dtype(shortage.dtype)
    if dtype == "F32" and not shortage.trains:
        dtype = stored if itemsize(stored) == 2 else "BF16"
    budget = int(shortage.room / (1 - MARGIN))  # what decoding takes is counted in room
    request = request_of(checkpoint, ExpertOptions(), checkpoint.mixtures)
    fit = nearest_ratio(checkpoint, budget, Load(1, 1, 1), request, dtype=dtype)
    if not fit.fits or fit.keep == fit.held:
        return
    # Of quantised weights no other type can be written: they are decoded to it as the model is run.
    casts = itemsize(stored) > itemsize(dtype) and not checkpoint.quantised
    cast = f" --dtype {config_dtype(dtype)}" if casts else ""
    size = bytes_text(fit.dense + fit.experts)
    yield f"prune-experts {checkpoint.path} --ratio {fit.ratio:g}{cast} first ({size})"


def option_size(count: int) -> str:
    """At most so many bytes, as an option takes it: 18.7GiB, 512MiB."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        tenths = 10 * count >> power
        if tenths >= 10:
            return f"{tenths / 10:g}{unit}"
    return str(count)
