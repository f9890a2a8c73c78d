"""The ways to hold a checkpoint in a memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prunecli.errors import PruneError
from prunecli.evaluation.one_pass import OnePass, measure_pass, pass_document
from prunecli.methods.experts.budget import Request
from prunecli.methods.experts.memory_fit import MemoryFit, at_ratios, fit_payload, margin_bytes, nearest_ratio
from prunecli.model.cache import find_cache
from prunecli.model.cost import Load, decoding_bytes, stored_dtype, weight_bytes
from prunecli.model.quantisation import method_of, value_dtype
from prunecli.tensors.dtypes import config_dtype, is_float, itemsize, parse_dtype

if TYPE_CHECKING:
    import torch

    from prunecli.model.checkpoint import Checkpoint
    from prunecli.results.inspection import Fit, Way

BATCH_TOKENS = 4096
BATCH_LENGTH = 64
"""Layer by layer: padded tokens in a batch (the default of --batch-tokens), and of its longest sentence; windows of
text are as long as the commands make them."""

TEXT_RATIOS = (0.25, 0.5, 0.75)
"""Of the experts of language models: what is left of them is said whether or not the model fits."""


@dataclass(frozen=True)
class Whole:
    """The whole model, or what is left of it, decoding.

    Attributes:
        dtype: of the weights, as in config.json; of quantised ones as they are stored, the method.
        target: what they are cast to, or decoded to, as in safetensors; None: as stored.
        as_stored: whether no weight is cast.
        is_decoded: whether quantised weights are held as what they stand for, as prunecli and CPUs run them.
        weights: bytes.
        cache: bytes of the attention cache.
        activations: bytes of those.
        needed: bytes of the smallest memory that holds both and the margin.
        fits: whether the memory asked for holds them.
        pruned: the experts that are removed; None: none.
    """

    dtype: str
    target: str | None
    as_stored: bool
    weights: int
    cache: int
    activations: int
    needed: int
    fits: bool
    pruned: MemoryFit | None = None
    is_decoded: bool = False


@dataclass(frozen=True)
class ByLayer:
    """The model run layer by layer.

    Attributes:
        device, dtype: that it computes on and in.
        weights: bytes that are held at a time, at the least.
        needed: the smallest `--memory` that works.
        tokens: whose hidden states stay in the memory asked for, on a GPU in the host's; None: it does not fit.
        length: tokens of a batch's longest sentence or window.
    """

    device: str
    dtype: str
    weights: int
    needed: int
    tokens: int | None
    length: int = BATCH_LENGTH

    @property
    def fits(self) -> bool:
        """Whether the memory asked for is enough."""
        return self.tokens is not None


@dataclass(frozen=True)
class Capacity:
    """What fits where.

    Attributes:
        budget: the memory, in bytes.
        load: what decodes in it.
        wholes: the model in each type, then what is left of it where it does not fit and has experts.
        layered: running layer by layer, a mixture in its stock class by `collect-gates`; none: it is not done.
        one_pass: how long that takes.
        ratio: of the experts to remove in the type asked for, or as stored; None: the model has no experts.
        unknown: plain lines on what could not be counted.
        is_stock: whether it runs in its stock class.
    """

    budget: int
    load: Load
    wholes: tuple[Whole, ...]
    layered: tuple[ByLayer, ...]
    one_pass: OnePass | None
    ratio: MemoryFit | None
    unknown: tuple[str, ...] = ()
    is_stock: bool = False


def what_fits(
    checkpoint: Checkpoint, budget: int, dtype: str | None, request: Request, load: Load
) -> Capacity:
    """Reckon from headers; where the model is run layer by layer, build it without weights, and where prunecli builds
    it itself, measure the machine for about two seconds.

    Args:
        budget: bytes.
        dtype: type of the weights in the first place; None: as stored.
        request: how experts are removed.
        load: what decodes.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: tensors that do not fit config.json, or cannot be read.
    """
    family = checkpoint.family or checkpoint.require_architecture()
    stock = checkpoint.runs_stock
    sparse = bool(family.mixture and checkpoint.mixtures) and not checkpoint.has_constants
    targets = _dtypes(checkpoint, dtype)
    ways = [_whole(checkpoint, budget, target, load) for target in targets]
    pruned: list[Whole] = []
    ratio = nearest_ratio(checkpoint, budget, load, request, dtype=dtype) if sparse else None
    for target, whole in zip(targets, ways, strict=True):
        fits = []
        if sparse and stock and (checkpoint.quantised or target == targets[0]):
            fits = list(at_ratios(checkpoint, budget, load, request, TEXT_RATIOS, dtype=target))
        if ratio is not None and not whole.fits:
            known = target == ratio.dtype
            nearest = ratio if known else nearest_ratio(checkpoint, budget, load, request, dtype=target)
            fits = [fit for fit in fits if fit.keep != nearest.keep] + [nearest]
        pruned += [_pruned(whole, fit) for fit in sorted(fits, key=lambda fit: fit.ratio)]
    layered, unlayered = (
        _stock_by_layer(checkpoint, budget) if stock else ((*_by_layer(checkpoint, budget),), ())
    )
    return Capacity(
        budget,
        load,
        (*ways, *pruned),
        layered,
        None if stock else measure_pass(checkpoint, sparse=sparse),
        ratio,
        (*find_cache(checkpoint).unknown, *unlayered) if stock else (),
        stock,
    )


def _dtypes(checkpoint: Checkpoint, asked: str | None) -> list[str | None]:
    """The type asked for or None, and those of 32 and 16 bits that it is not one of; of quantised weights None, and
    what they are decoded to where that is known."""
    first = None if asked is None else parse_dtype(asked)
    if method_of(checkpoint.config) or checkpoint.quantised:
        return [None, first or value_dtype(checkpoint.config)] if checkpoint.quantised else [None]
    floats = {info.dtype for info in checkpoint.tensors.values() if is_float(info.dtype)}
    alone = first or (floats.pop() if len(floats) == 1 else None)
    same = 0 if alone is None else itemsize(alone)
    return [first, *(other for other in ("F32", "F16") if itemsize(other) != same)]


def _whole(checkpoint: Checkpoint, budget: int, target: str | None, load: Load) -> Whole:
    weights = weight_bytes(checkpoint, target)
    cache, activations = decoding_bytes(checkpoint, load, target)
    total = weights + cache + activations
    floats = {info.dtype for info in checkpoint.tensors.values() if is_float(info.dtype)}
    named = config_dtype(target or stored_dtype(checkpoint))
    if target is None and checkpoint.quantised:
        named = method_of(checkpoint.config) or next(iter(checkpoint.quantised.values())).scheme
    return Whole(
        named,
        target,
        target is None or (not checkpoint.quantised and floats <= {target}),
        weights,
        cache,
        activations,
        _memory_for(total),
        total <= budget - margin_bytes(budget),
        is_decoded=target is not None and bool(checkpoint.quantised),
    )


def _pruned(whole: Whole, fit: MemoryFit) -> Whole:
    return replace(
        whole,
        weights=fit.dense + fit.experts,
        needed=_memory_for(fit.total),
        fits=fit.fits,
        pruned=fit,
    )


def _memory_for(total: int) -> int:
    """The smallest memory of which the margin leaves so much."""
    needed = total
    while needed - margin_bytes(needed) < total:
        needed += total - (needed - margin_bytes(needed))
    return needed


def _stock_by_layer(checkpoint: Checkpoint, budget: int) -> tuple[tuple[ByLayer, ...], tuple[str, ...]]:
    """Of a mixture that runs in its stock class; none, and perhaps why, where its class or weights do not go."""
    from prunecli.modules.stock_model import refused_by_layer

    if not checkpoint.is_local or refused_by_layer(checkpoint) is not None:
        return (), ()
    try:
        return tuple(_by_layer(checkpoint, budget)), ()
    except PruneError as error:  # what else fits is said all the same
        return (), (f"Not counted layer by layer: {error.message}.",)


def _by_layer(checkpoint: Checkpoint, budget: int) -> Iterator[ByLayer]:
    import torch

    from prunecli.modules.devices import found_device
    from prunecli.modules.precision import choose_dtype

    device = found_device()
    first = choose_dtype("auto", checkpoint, device)
    for dtype in dict.fromkeys((first, torch.bfloat16 if device.type == "cpu" else first)):
        yield layers_in(checkpoint, budget, device, dtype)


def layers_in(checkpoint: Checkpoint, budget: int, device: torch.device, dtype: torch.dtype) -> ByLayer:
    """The model run layer by layer in `budget` bytes, batches of the usual size; a mixture in its stock class as
    `collect-gates` runs it."""
    from prunecli.modules.dequantised import as_run
    from prunecli.modules.machine import CONTEXT_BYTES, available_memory, resident_now
    from prunecli.modules.precision import dtype_name
    from prunecli.running.layerwise.budget import (
        MIN_BUFFERS,
        Demand,
        activation_bytes,
        output_bytes,
        plan_memory,
        smallest_memory,
        state_bytes,
        stock_activation_bytes,
        stock_state_bytes,
    )
    from prunecli.running.layerwise.parts import make_skeleton
    from prunecli.running.layerwise.runner import shape_of
    from prunecli.running.lengths import window_length

    checkpoint = as_run(checkpoint, dtype)
    skeleton = make_skeleton(checkpoint, device, dtype)
    shape = shape_of(checkpoint, skeleton, dtype)
    tokenizer, length = _tokenizer(checkpoint), BATCH_LENGTH
    if skeleton.is_stock:
        length = window_length(skeleton.model, tokenizer)
        activations = stock_activation_bytes(shape, max(1, BATCH_TOKENS // length), length)
        state = stock_state_bytes(shape, 1)
    else:
        activations = activation_bytes(shape, BATCH_TOKENS // BATCH_LENGTH, BATCH_LENGTH, BATCH_LENGTH)
        state = state_bytes(shape, 1, 1)
    if not shape.experts:  # gates are collected without logits, all else needs them
        vocabulary = checkpoint.layout.sizes.count("vocab_size")
        activations = max(activations, output_bytes(shape, vocabulary, BATCH_TOKENS, backward=False))
    process = resident_now() if device.type == "cpu" else CONTEXT_BYTES  # before any weight is read
    demand = Demand(process, skeleton.resident_bytes, skeleton.widest_bytes, activations)
    weights = demand.resident + MIN_BUFFERS * demand.block
    needed = smallest_memory(demand)
    tokens = None
    if budget >= needed:
        states = plan_memory(budget, demand).states if device.type == "cpu" else available_memory() // 2
        tokens = states // state
    return ByLayer(device.type, dtype_name(dtype), weights, needed, tokens, length)


def _tokenizer(checkpoint: Checkpoint) -> Any:
    """Its tokenizer, which a run holds too; None: there is none, so that nothing runs, but what fits can be said."""
    from prunecli.text.tokens import load_tokenizer

    try:
        return load_tokenizer(checkpoint.path)
    except PruneError:
        return None


def fit_document(fits: Capacity) -> Fit:
    """All of it, as `inspect --json` prints it."""
    from prunecli.results.inspection import Fit, LayerWays, Way

    fields: dict[str, Any] = {
        "budget_bytes": fits.budget,
        "batch": fits.load.batch,
        "beam": fits.load.beam,
        "length": fits.load.length,
        **({} if fits.ratio is None or not fits.ratio.fits else fit_payload(fits.ratio)),
        **({} if fits.one_pass is None else {"pass": pass_document(fits.one_pass)}),
        **({"unknown": list(fits.unknown)} if fits.unknown else {}),
    }
    by_layer = [
        Way(
            device=way.device,
            dtype=way.dtype,
            weight_bytes=way.weights,
            needed_bytes=way.needed,
            fits=way.fits,
            state_tokens=way.tokens,
        )
        for way in fits.layered
    ]
    return Fit(
        **fields,
        whole=[_way(whole) for whole in fits.wholes if whole.pruned is None],
        pruned=[_way(whole) for whole in fits.wholes if whole.pruned is not None],
        by_layer=LayerWays(
            batch_tokens=BATCH_TOKENS,
            batch_length=fits.layered[0].length if fits.layered else BATCH_LENGTH,
            ways=by_layer,
        ),
    )


def _way(whole: Whole) -> Way:
    from prunecli.results.inspection import Way

    fit = whole.pruned
    experts: dict[str, Any] = {} if fit is None else {"ratio": fit.ratio, "keep": fit.keep, "held": fit.held}
    return Way(
        dtype=whole.dtype,
        as_stored=whole.as_stored,
        weight_bytes=whole.weights,
        cache_bytes=whole.cache,
        decoding_bytes=whole.cache + whole.activations,
        needed_bytes=whole.needed,
        fits=whole.fits,
        **experts,
    )
