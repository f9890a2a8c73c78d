"""The ways to hold a checkpoint in a memory, and how long a pass layer by layer takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prunecli.methods.experts.budget import Request
from prunecli.methods.experts.memory_fit import MemoryFit, fit_payload, margin_bytes, nearest_ratio
from prunecli.model.cost import Load, decoding_bytes, model_dim, stored_dtype, token_products, weight_bytes
from prunecli.tensors.dtypes import config_dtype, is_float, itemsize, parse_dtype

if TYPE_CHECKING:
    import torch

    from prunecli.model.checkpoint import Checkpoint
    from prunecli.modules.machine import Multiplying, Reading
    from prunecli.results.inspection import Fit, Pass, Way

BATCH_TOKENS = 4096
BATCH_LENGTH = 64
"""Layer by layer: padded tokens in a batch (the default of --batch-tokens), and of its longest sentence."""

SENTENCES = 997
SENTENCE_TOKENS = 40
"""The text of a pass: that of FLORES-200 dev, one pair."""

MOST_READ = 1 << 30
READ_SECONDS = 0.8
PRODUCT_SECONDS = 0.5
"""A measurement ends here."""


@dataclass(frozen=True)
class Whole:
    """The whole model, or what is left of it, decoding.

    Attributes:
        dtype: of the weights, as in config.json.
        target: what they are cast to, as in safetensors; None: as stored.
        as_stored: whether no weight is cast.
        weights: bytes.
        decoding: bytes of the attention cache and of the activations.
        needed: bytes of the smallest memory that holds both and the margin.
        fits: whether the memory asked for holds them.
        pruned: the experts that are removed; None: none.
    """

    dtype: str
    target: str | None
    as_stored: bool
    weights: int
    decoding: int
    needed: int
    fits: bool
    pruned: MemoryFit | None = None


@dataclass(frozen=True)
class ByLayer:
    """The model run layer by layer.

    Attributes:
        device, dtype: that it computes on and in.
        weights: bytes that are held at a time, at the least.
        needed: the smallest `--memory` that works.
        tokens: whose hidden states stay in the memory asked for, on a GPU in the host's; None: it does not fit.
    """

    device: str
    dtype: str
    weights: int
    needed: int
    tokens: int | None

    @property
    def fits(self) -> bool:
        """Whether the memory asked for is enough."""
        return self.tokens is not None


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


@dataclass(frozen=True)
class Capacity:
    """What fits where.

    Attributes:
        budget: the memory, in bytes.
        load: what decodes in it.
        wholes: the model in each type, then what is left of it where it does not fit and has experts.
        layered: running layer by layer.
        one_pass: how long that takes.
        ratio: of the experts to remove in the type asked for, or as stored; None: the model has no experts.
    """

    budget: int
    load: Load
    wholes: tuple[Whole, ...]
    layered: tuple[ByLayer, ...]
    one_pass: OnePass
    ratio: MemoryFit | None


def what_fits(
    checkpoint: Checkpoint, budget: int, dtype: str | None, request: Request, load: Load
) -> Capacity:
    """Reckon from headers, build the model without weights, and measure the machine for about two seconds.

    Args:
        budget: bytes.
        dtype: type of the weights in the first place; None: as stored.
        request: how experts are removed.
        load: what decodes.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: tensors that do not fit config.json, or cannot be read.
    """
    whole_ways = [_whole(checkpoint, budget, target, load) for target in _dtypes(checkpoint, dtype)]
    pruned = []
    sparse = bool(checkpoint.mixtures)
    for target, whole in zip(_dtypes(checkpoint, dtype), whole_ways, strict=True):
        if sparse and not whole.fits:
            pruned.append(_pruned(whole, nearest_ratio(checkpoint, budget, load, request, dtype=target)))
    return Capacity(
        budget,
        load,
        (*whole_ways, *pruned),
        tuple(_by_layer(checkpoint, budget)),
        _one_pass(checkpoint, sparse=sparse),
        nearest_ratio(checkpoint, budget, load, request, dtype=dtype) if sparse else None,
    )


def _dtypes(checkpoint: Checkpoint, asked: str | None) -> list[str | None]:
    """The type asked for or None, and those of 32 and 16 bits that it is not one of."""
    first = None if asked is None else parse_dtype(asked)
    floats = {info.dtype for info in checkpoint.tensors.values() if is_float(info.dtype)}
    alone = first or (floats.pop() if len(floats) == 1 else None)
    same = 0 if alone is None else itemsize(alone)
    return [first, *(other for other in ("F32", "F16") if itemsize(other) != same)]


def _whole(checkpoint: Checkpoint, budget: int, target: str | None, load: Load) -> Whole:
    weights = weight_bytes(checkpoint, target)
    decoding = sum(decoding_bytes(checkpoint, load, target))
    floats = {info.dtype for info in checkpoint.tensors.values() if is_float(info.dtype)}
    return Whole(
        config_dtype(target or stored_dtype(checkpoint)),
        target,
        target is None or floats <= {target},
        weights,
        decoding,
        _memory_for(weights + decoding),
        weights + decoding <= budget - margin_bytes(budget),
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


def _by_layer(checkpoint: Checkpoint, budget: int) -> Iterator[ByLayer]:
    import torch

    from prunecli.modules.loading import choose_device
    from prunecli.modules.precision import choose_dtype

    device = choose_device("auto")
    first = choose_dtype("auto", checkpoint, device)
    for dtype in dict.fromkeys((first, torch.bfloat16 if device.type == "cpu" else first)):
        yield layers_in(checkpoint, budget, device, dtype)


def layers_in(checkpoint: Checkpoint, budget: int, device: torch.device, dtype: torch.dtype) -> ByLayer:
    """The model run layer by layer in `budget` bytes, batches of the usual size."""
    from prunecli.modules.machine import available_memory
    from prunecli.running.layerwise.budget import (
        MIN_BUFFERS,
        Demand,
        activation_bytes,
        output_bytes,
        plan_memory,
        smallest_memory,
        state_bytes,
    )
    from prunecli.running.layerwise.parts import make_skeleton
    from prunecli.running.layerwise.runner import shape_of

    skeleton = make_skeleton(checkpoint, device, dtype)
    shape = shape_of(checkpoint, skeleton, dtype)
    activations = activation_bytes(shape, BATCH_TOKENS // BATCH_LENGTH, BATCH_LENGTH, BATCH_LENGTH)
    if not shape.experts:  # gates are collected without logits, all else needs them
        vocabulary = checkpoint.layout.sizes.count("vocab_size")
        activations = max(activations, output_bytes(shape, vocabulary, BATCH_TOKENS, backward=False))
    demand = Demand(_process(checkpoint, device), skeleton.resident_bytes, skeleton.widest_bytes, activations)
    weights = demand.resident + MIN_BUFFERS * demand.block
    needed = smallest_memory(demand)
    tokens = None
    if budget >= needed:
        states = plan_memory(budget, demand).states if device.type == "cpu" else available_memory() // 2
        tokens = states // state_bytes(shape, 1, 1)
    return ByLayer(device.type, _name(dtype), weights, needed, tokens)


def _process(checkpoint: Checkpoint, device: torch.device) -> int:
    """Resident bytes before any weight is read, of this process: it has loaded what such a run loads."""
    from prunecli.errors import PruneError
    from prunecli.modules.machine import resident_now
    from prunecli.text.tokens import load_tokenizer

    if device.type != "cpu":
        return 0
    try:
        tokenizer = load_tokenizer(checkpoint.path)
    except PruneError:  # without one nothing runs, but what fits can be said
        tokenizer = None
    now = resident_now()
    del tokenizer
    return now


def _one_pass(checkpoint: Checkpoint, *, sparse: bool) -> OnePass:
    """Of a mixture of experts, gates are collected: no logits. Another model makes them."""
    from prunecli.modules.machine import disk_speed

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
    from prunecli.modules.machine import model_speed
    from prunecli.modules.precision import choose_dtype

    family = checkpoint.require_architecture()
    width = checkpoint.layout.sizes.count(model_dim(family))
    widest = max(checkpoint.layout.sizes.count(stack.ffn.width) for stack in family.stacks)
    for device in dict.fromkeys((torch.device("cpu"), _auto())):
        dtype = choose_dtype("auto", checkpoint, device)
        measured = model_speed(width, widest, dtype, device, PRODUCT_SECONDS)
        yield Computing(device_name(device), _name(dtype), torch.get_num_threads(), measured)


def _auto() -> torch.device:
    from prunecli.modules.loading import choose_device

    return choose_device("auto")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fit_document(fits: Capacity) -> Fit:
    """All of it, as `inspect --json` prints it."""
    from prunecli.results.inspection import Fit, LayerWays, Way

    fields: dict[str, Any] = {
        "budget_bytes": fits.budget,
        "batch": fits.load.batch,
        "beam": fits.load.beam,
        "length": fits.load.length,
        **({} if fits.ratio is None or not fits.ratio.fits else fit_payload(fits.ratio)),
        "pass": _pass(fits.one_pass),
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
        by_layer=LayerWays(batch_tokens=BATCH_TOKENS, batch_length=BATCH_LENGTH, ways=by_layer),
    )


def _way(whole: Whole) -> Way:
    from prunecli.results.inspection import Way

    fit = whole.pruned
    experts: dict[str, Any] = {} if fit is None else {"ratio": fit.ratio, "keep": fit.keep, "held": fit.held}
    return Way(
        dtype=whole.dtype,
        as_stored=whole.as_stored,
        weight_bytes=whole.weights,
        decoding_bytes=whole.decoding,
        needed_bytes=whole.needed,
        fits=whole.fits,
        **experts,
    )


def _pass(single: OnePass) -> Pass:
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
