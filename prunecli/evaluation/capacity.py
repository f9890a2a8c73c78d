"""The memory that a model takes and what fits in a memory: for `inspect --fit`, and for errors of too little memory."""

from collections.abc import Iterator
from contextlib import suppress
from math import ceil

import torch

from prunecli.errors import CheckpointError, MemoryShortError, PruneError
from prunecli.methods.experts.options import (
    MARGIN,
    margin_bytes,
    memory_fits,
    request_of,
)
from prunecli.methods.options import ExpertOptions
from prunecli.model.cache import find_cache
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.cost import Load, decoding_bytes, stored_dtype, weight_bytes
from prunecli.model.quantised import method_of, value_dtype
from prunecli.modules.building import make_model, refused_by_layer
from prunecli.modules.dequantised import as_run
from prunecli.modules.devices import found_device
from prunecli.modules.fitting import FREE_SHARE, Need, candidates, dtype_name
from prunecli.modules.machine import CONTEXT_BYTES, available_memory, resident_now
from prunecli.results.inspection import Fit, LayerWays, Way
from prunecli.running.encoding import window_length
from prunecli.running.layerwise.budget import (
    MIN_BUFFERS,
    Demand,
    shape_of,
)
from prunecli.tensors.dtypes import config_dtype, is_float, itemsize, parse_dtype
from prunecli.tensors.quantities import bytes_text, option_size
from prunecli.text.tokens import load_tokenizer

BATCH_TOKENS = 4096
BATCH_LENGTH = 64
"""Layer by layer: padded tokens in a batch (the default of --batch-tokens), and of its longest sentence; windows of
text are as long as the commands make them."""

TEXT_RATIOS = (0.25, 0.5, 0.75)
"""Ratios of the experts of language models that are shown whether or not the model fits."""

LAYERS_SHARE = 0.8
"""Part of the free memory that `--memory` is advised to take."""


def what_fits(checkpoint: Checkpoint, budget: int, dtype: str | None, load: Load) -> Fit:
    """The ways to hold a model in a memory: whole in each type, without some experts, layer by layer.

    Experts are removed as `prune-experts` does by default.

    Headers are read. If the model can run layer by layer, it is built without weights.

    Args:
        budget: bytes.
        dtype: type of the weights in the first place; None: as stored.
        load: what decodes.

    Raises:
        UnsupportedModelError: as `decoding_bytes`.
        CheckpointError: tensors that do not fit config.json, or cannot be read.
    """
    stock = checkpoint.runs_stock
    sparse = bool(checkpoint.mixtures) and not checkpoint.has_constants
    floats = {info.dtype for info in checkpoint.tensors.values() if is_float(info.dtype)}
    first = None if dtype is None else parse_dtype(dtype)
    if checkpoint.quantised:
        # As it is stored, and as what it is decoded to, if known.
        targets = [None, first or value_dtype(checkpoint.config)]
    elif method_of(checkpoint.config):
        targets = [None]
    else:  # the type asked for, or as stored; and those of 32 and 16 bits that it is not one of
        alone = first or (next(iter(floats)) if len(floats) == 1 else None)
        same = 0 if alone is None else itemsize(alone)
        targets = [first, *(other for other in ("F32", "F16") if itemsize(other) != same)]
    whole = []
    pruned = []
    ratio = None
    if sparse:
        request = request_of(checkpoint, ExpertOptions(), checkpoint.mixtures)
        ratio = memory_fits(checkpoint, budget, load, request, dtype=dtype)[0]
    for target in targets:
        weights = weight_bytes(checkpoint, target)
        cache, activations = decoding_bytes(checkpoint, load, target)
        total = weights + cache + activations
        named = config_dtype(target or stored_dtype(checkpoint))
        if target is None and checkpoint.quantised:
            named = method_of(checkpoint.config) or next(iter(checkpoint.quantised.values())).scheme
        way = Way(
            dtype=named,
            as_stored=target is None or (not checkpoint.quantised and floats <= {target}),
            weight_bytes=weights,
            cache_bytes=cache,
            decoding_bytes=cache + activations,
            needed_bytes=_memory_for(total),
            fits=total <= budget - margin_bytes(budget),
        )
        whole.append(way)
        if not sparse:
            continue
        ratios = TEXT_RATIOS if stock and (checkpoint.quantised or target == targets[0]) else ()
        nearest, *fits = memory_fits(checkpoint, budget, load, request, ratios, dtype=target)
        if not way.fits:
            fits = [fit for fit in fits if fit.keep != nearest.keep] + [nearest]
        for fit in sorted(fits, key=lambda fit: fit.ratio):
            figures = {
                "weight_bytes": fit.dense_bytes + fit.expert_bytes,
                "needed_bytes": _memory_for(fit.total),
                "fits": fit.fits,
                "ratio": fit.ratio,
                "keep": fit.keep,
                "held": fit.held,
            }
            pruned.append(way.model_copy(update=figures))
    layered: list[tuple[Way, int]] = []
    unknown = [*find_cache(checkpoint).unknown] if stock and checkpoint.mixtures else []
    try:
        if not stock or (checkpoint.is_local and refused_by_layer(checkpoint) is None):
            device = found_device()
            usual = candidates("auto", [checkpoint], device)[0]
            dtypes = {usual: None, (torch.bfloat16 if device.type == "cpu" else usual): None}
            layered = [layers_in(checkpoint, budget, device, one) for one in dtypes]
    except PruneError as error:
        if not stock:
            raise
        # What else fits is said all the same.
        unknown.append(f"Not counted layer by layer: {error.message}.")
    fields = {
        "budget_bytes": budget,
        **vars(load),
        **({} if ratio is None or not ratio.fits else vars(ratio)),
        **({"unknown": unknown} if unknown else {}),
    }
    return Fit(
        **fields,
        whole=whole,
        pruned=pruned,
        by_layer=LayerWays(
            batch_tokens=BATCH_TOKENS,
            batch_length=layered[0][1] if layered else BATCH_LENGTH,
            ways=[way for way, _ in layered],
        ),
    )


def _memory_for(total: int) -> int:
    """The smallest memory that holds `total` bytes and the margin."""
    return ceil(total / (1 - MARGIN))


def layers_in(
    checkpoint: Checkpoint, budget: int, device: torch.device, dtype: torch.dtype
) -> tuple[Way, int]:
    """The model run layer by layer in `budget` bytes, and the tokens of the longest sentence or window of a batch.

    Batches are of the usual size; a mixture in its stock class runs as in `collect-gates`. `state_tokens` of the way
    are those whose hidden states stay in the memory, on a GPU in the host's; None: the model does not fit.
    """
    checkpoint = as_run(checkpoint, dtype)
    skeleton = make_model(checkpoint, device, dtype)
    shape = shape_of(checkpoint, skeleton, dtype)
    tokenizer, length = None, BATCH_LENGTH
    with suppress(PruneError):  # what fits is answered for a checkpoint without a tokenizer too
        tokenizer = load_tokenizer(checkpoint.path)  # a run holds it
    if checkpoint.runs_stock and skeleton.mixtures:
        length = window_length(skeleton.model, tokenizer)
    activations = shape.activation_bytes(max(1, BATCH_TOKENS // length), length, length)
    state = shape.state_bytes(1, 1)
    if not shape.experts:  # gates are collected without logits, all else needs them
        vocabulary = checkpoint.layout.require_tables().vocabulary
        activations = max(activations, shape.output_bytes(vocabulary, BATCH_TOKENS, backward=False))
    process = resident_now() if device.type == "cpu" else CONTEXT_BYTES  # before any weight is read
    demand = Demand(process, skeleton.resident_bytes, skeleton.widest_bytes)
    needed = demand.smallest(activations)
    tokens = None
    if budget >= needed:
        _, left = demand.plan(budget, activations)
        states = left if device.type == "cpu" else available_memory() // 2
        tokens = states // state
    way = Way(
        device=device.type,
        dtype=dtype_name(dtype),
        weight_bytes=demand.resident + MIN_BUFFERS * demand.block,
        needed_bytes=needed,
        fits=tokens is not None,
        state_tokens=tokens,
    )
    return way, length


def remedy(error: MemoryShortError) -> str:
    """One line: a smaller type, layer by layer, fewer experts, whichever fit; else the error's own."""
    need: Need = error.need
    checkpoint = open_model(need.checkpoint.path)
    ways = list(_ways(checkpoint, need))
    said = f"What fits: {'; '.join(ways)}." if ways else str(error.remedy)
    if not _is_known(checkpoint):
        return said
    return f"{said} More: prunecli inspect {checkpoint.path} --fit {option_size(sum(need.free))}"


def _is_known(checkpoint: Checkpoint) -> bool:
    """Whether its class says what it is made of."""
    try:
        return bool(checkpoint.resolved)
    except CheckpointError:
        return False


def _ways(checkpoint: Checkpoint, need: Need) -> Iterator[str]:
    dtype = parse_dtype(str(need.dtype))
    if not need.trains and weight_bytes(checkpoint, dtype) <= FREE_SHARE * sum(need.free):
        yield "a smaller batch or beam"
    if dtype == "F32" and not need.trains:
        smaller = weight_bytes(checkpoint, "BF16")
        if smaller <= need.room:
            yield f"--compute-dtype bfloat16 ({bytes_text(smaller)})"
    if need.dtype == torch.int8 or not _is_known(checkpoint):
        return
    if need.by_layer and (not checkpoint.runs_stock or refused_by_layer(checkpoint) is None):
        memory = int(LAYERS_SHARE * need.free[0])
        way, _ = layers_in(checkpoint, sum(need.free), need.devices.first, need.dtype)
        if way.needed_bytes <= memory:
            yield f"{need.by_layer} {option_size(memory)}"
    if not checkpoint.mixtures or checkpoint.has_constants:
        return
    # The smallest ratio of experts to remove, in 16 bits where the weights are not trained.
    stored = stored_dtype(checkpoint)
    if dtype == "F32" and not need.trains:
        dtype = stored if itemsize(stored) == 2 else "BF16"
    budget = int(need.room / (1 - MARGIN))  # what decoding takes is counted in room
    request = request_of(checkpoint, ExpertOptions(), checkpoint.mixtures)
    fit = memory_fits(checkpoint, budget, Load(1, 1, 1), request, dtype=dtype)[0]
    if not fit.fits or fit.keep == fit.held:
        return
    # Of quantised weights no other type can be written: they are decoded to it as the model is run.
    casts = itemsize(stored) > itemsize(dtype) and not checkpoint.quantised
    cast = f" --dtype {config_dtype(dtype)}" if casts else ""
    size = bytes_text(fit.dense_bytes + fit.expert_bytes)
    yield f"prune-experts {checkpoint.path} --ratio {fit.ratio:g}{cast} first ({size})"
