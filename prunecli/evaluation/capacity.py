"""The ways to hold a checkpoint in a memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prunecli.errors import PruneError, UnsupportedModelError
from prunecli.methods.experts.budget import (
    MemoryFit,
    Request,
    at_ratios,
    fit_payload,
    margin_bytes,
    nearest_ratio,
)
from prunecli.model.cache import find_cache
from prunecli.model.cost import (
    Load,
    decoding_bytes,
    model_dim,
    stored_dtype,
    token_products,
    weight_bytes,
)
from prunecli.model.quantisation import method_of, value_dtype
from prunecli.tensors.dtypes import config_dtype, is_float, itemsize, parse_dtype

if TYPE_CHECKING:
    import torch

    from prunecli.model.checkpoint import Checkpoint
    from prunecli.results.inspection import Fit, Pass, Way

BATCH_TOKENS = 4096
BATCH_LENGTH = 64
"""Layer by layer: padded tokens in a batch (the default of --batch-tokens), and of its longest sentence; windows of
text are as long as the commands make them."""

SENTENCES = 997
SENTENCE_TOKENS = 40
"""The text of a pass: that of FLORES-200 dev, one pair."""

MOST_READ = 1 << 30
READ_SECONDS = 0.8
PRODUCT_SECONDS = 0.5
"""A measurement ends here."""

TEXT_RATIOS = (0.25, 0.5, 0.75)
"""Of the experts of language models: what is left of them is said whether or not the model fits."""


@dataclass(frozen=True)
class Whole:
    """The whole model, or what is left after removing experts, decoding.

    Attributes:
        way: sizes in bytes, and whether the memory asked for holds them.
        target: type that the weights are cast to, or decoded to, as in safetensors; None: as stored.
        pruned: the experts that are removed; None: none.
        is_decoded: whether quantised weights are held as what they stand for, as prunecli and CPUs run them.
    """

    way: Way
    target: str | None
    pruned: MemoryFit | None = None
    is_decoded: bool = False


@dataclass(frozen=True)
class Capacity:
    """What fits where.

    Attributes:
        budget: the memory, in bytes.
        load: what decodes in it.
        wholes: the model in each type, then what is left of it where it does not fit and has experts.
        layered: running layer by layer, a mixture in its stock class by `collect-gates`; none: it is not done.
        length: tokens of the longest sentence or window of a batch, layer by layer.
        one_pass: how long that takes.
        ratio: of the experts to remove in the type asked for, or as stored; None: the model has no experts.
        unknown: plain lines on what could not be counted.
        is_stock: whether it runs in its stock class.
    """

    budget: int
    load: Load
    wholes: tuple[Whole, ...]
    layered: tuple[Way, ...]
    length: int
    one_pass: Pass | None
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
    from prunecli.modules.stock_model import refused_by_layer

    family = checkpoint.family
    if family is None:
        checkpoint.require_architecture()  # refuses a class that is not known
        raise UnsupportedModelError(
            f"{checkpoint.path}: what a model of type {checkpoint.model_type} takes while it decodes is not declared",
            "Measure it: prunecli bench-latency.",
        )
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
        if ratio is not None and not whole.way.fits:
            known = target == ratio.dtype
            nearest = ratio if known else nearest_ratio(checkpoint, budget, load, request, dtype=target)
            fits = [fit for fit in fits if fit.keep != nearest.keep] + [nearest]
        for fit in sorted(fits, key=lambda fit: fit.ratio):
            figures = {"weight_bytes": fit.dense + fit.experts, "needed_bytes": _memory_for(fit.total)}
            experts = {"ratio": fit.ratio, "keep": fit.keep, "held": fit.held}
            way = whole.way.model_copy(update={**figures, "fits": fit.fits, **experts})
            pruned.append(replace(whole, way=way, pruned=fit))
    layered: tuple[tuple[Way, int], ...] = ()
    unknown = find_cache(checkpoint).unknown if stock else ()
    try:
        if not stock or (checkpoint.is_local and refused_by_layer(checkpoint) is None):
            layered = tuple(_by_layer(checkpoint, budget))
    except PruneError as error:
        if not stock:
            raise
        # What else fits is said all the same.
        unknown = (*unknown, f"Not counted layer by layer: {error.message}.")
    return Capacity(
        budget,
        load,
        (*ways, *pruned),
        tuple(way for way, _ in layered),
        layered[0][1] if layered else BATCH_LENGTH,
        None if stock else _measure_pass(checkpoint, sparse=sparse),
        ratio,
        unknown,
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
    from prunecli.results.inspection import Way

    weights = weight_bytes(checkpoint, target)
    cache, activations = decoding_bytes(checkpoint, load, target)
    total = weights + cache + activations
    floats = {info.dtype for info in checkpoint.tensors.values() if is_float(info.dtype)}
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
    return Whole(way, target, is_decoded=target is not None and bool(checkpoint.quantised))


def _memory_for(total: int) -> int:
    """The smallest memory of which the margin leaves so much."""
    needed = total
    while needed - margin_bytes(needed) < total:
        needed += total - (needed - margin_bytes(needed))
    return needed


def _by_layer(checkpoint: Checkpoint, budget: int) -> Iterator[tuple[Way, int]]:
    import torch

    from prunecli.modules.devices import found_device
    from prunecli.modules.precision import choose_dtype

    device = found_device()
    first = choose_dtype("auto", checkpoint, device)
    for dtype in dict.fromkeys((first, torch.bfloat16 if device.type == "cpu" else first)):
        yield layers_in(checkpoint, budget, device, dtype)


def layers_in(
    checkpoint: Checkpoint, budget: int, device: torch.device, dtype: torch.dtype
) -> tuple[Way, int]:
    """The model run layer by layer in `budget` bytes, and the tokens of the longest sentence or window of a batch.

    Batches are of the usual size; a mixture in its stock class runs as in `collect-gates`. `state_tokens` of the way
    are those whose hidden states stay in the memory, on a GPU in the host's; None: the model does not fit.
    """
    from prunecli.modules.dequantised import as_run
    from prunecli.modules.machine import CONTEXT_BYTES, available_memory, resident_now
    from prunecli.modules.precision import dtype_name
    from prunecli.results.inspection import Way
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
    needed = smallest_memory(demand)
    tokens = None
    if budget >= needed:
        states = plan_memory(budget, demand).states if device.type == "cpu" else available_memory() // 2
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


def _tokenizer(checkpoint: Checkpoint) -> Any:
    """Its tokenizer, which a run holds too; None: there is none, so that nothing runs, but what fits can be said."""
    from prunecli.text.tokens import load_tokenizer

    try:
        return load_tokenizer(checkpoint.path)
    except PruneError:
        return None


def _measure_pass(checkpoint: Checkpoint, *, sparse: bool) -> Pass:
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


def fit_document(fits: Capacity) -> Fit:
    """All of it, as `inspect --json` prints it."""
    from prunecli.results.inspection import Fit, LayerWays

    fields: dict[str, Any] = {
        "budget_bytes": fits.budget,
        "batch": fits.load.batch,
        "beam": fits.load.beam,
        "length": fits.load.length,
        **({} if fits.ratio is None or not fits.ratio.fits else fit_payload(fits.ratio)),
        **({} if fits.one_pass is None else {"pass": fits.one_pass}),
        **({"unknown": list(fits.unknown)} if fits.unknown else {}),
    }
    return Fit(
        **fields,
        whole=[whole.way for whole in fits.wholes if whole.pruned is None],
        pruned=[whole.way for whole in fits.wholes if whole.pruned is not None],
        by_layer=LayerWays(batch_tokens=BATCH_TOKENS, batch_length=fits.length, ways=list(fits.layered)),
    )
