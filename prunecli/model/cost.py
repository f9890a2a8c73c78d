"""What running a model costs: bytes of memory.

**Memory** is its weights in a type, and what decoding holds beside them. With b = batch, s = batch x beam sequences, n
tokens a sequence (source and target alike), d = the width of the hidden states, k = that of an attention's keys (d, or
less where query heads share them) and w bytes per value:

- attention cache: decoder layers x 2 x attentions x s x n x k x w (keys and values, own and cross), and once more for
  the layer that a beam reorders;
- encoder, or the prompt of a model without one: b x n x (4 d + widest FFN) x w, and its output for every beam,
  s x n x d x w;
- scores: s x vocabulary x 3 x 4 (logits, their log-softmax and the beam's sums in float32).

A model that is an encoder alone does not decode: one batch goes through it, and beams do not count.

Of mixtures that run in their stock class, what layers keep is that of `model.cache`, and the widest layer's once more,
since it is copied as it grows; "widest FFN" is the widest matrix of a layer, or what the experts of a token are wide.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from prunecli.architectures.records import SEQ2SEQ
from prunecli.errors import UnsupportedModelError
from prunecli.model.cache import find_cache, stated_count, text_layers
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import text_config
from prunecli.model.layout import ModelLayout
from prunecli.model.parts import AttentionLayer
from prunecli.model.quantised import owners_of
from prunecli.model.sparse_layer import SparseLayer
from prunecli.tensors.dtypes import is_float, itemsize


@dataclass(frozen=True)
class Load:
    """Load of decoding: `batch` sentences at a time, `beam` hypotheses each, of up to `length` tokens."""

    batch: int = 1
    beam: int = 4
    length: int = 128


TEXT_LENGTH = 4096


def usual_load(checkpoint: Checkpoint, **chosen: int) -> Load:
    """The usual load, where `chosen` says no more: for language models one text of 4,096 tokens, or of as many as
    have positions."""
    family = checkpoint.family or checkpoint.require_architecture()
    if family.auto_class == SEQ2SEQ or {stack.side for stack in family.stacks} == {"encoder"}:
        return Load(**chosen)
    positions = stated_count(text_config(checkpoint.config), "max_position_embeddings")
    length = min(TEXT_LENGTH, positions or TEXT_LENGTH)
    return Load(**{"beam": 1, "length": length, **chosen})


def weight_bytes(checkpoint: Checkpoint, target: str | None) -> int:
    """Bytes of all tensors, the floating-point ones in the type `target`; None: as stored, quantised ones too.

    "I8": the matrices of linear layers and experts with two scales in float32 to a row, all else in float32; an output
    layer that shares its table with the input has a copy of its own.
    """
    if target is None:
        return checkpoint.total_bytes
    if target == "I8":
        return _int8_bytes(checkpoint)
    return sum(info.cast(target).nbytes for info in checkpoint.unquantised.values())


def _int8_bytes(checkpoint: Checkpoint) -> int:
    layout = checkpoint.layout
    output = None if layout.tables is None else f"{layout.tables.output}.weight"
    total = 0
    for name, info in checkpoint.unquantised.items():
        _, part = layout.tensors.get(name, ((), None))
        in_int8 = info.numel + 8 * info.shape[0] if len(info.shape) == 2 else 0
        is_kept = part in ("embeddings", "router") and name != output
        total += in_int8 if in_int8 and not is_kept else info.cast("F32").nbytes
        total += in_int8 if output is not None and layout.ties.get(output) == name else 0
    return total


def tensor_bytes(checkpoint: Checkpoint, target: str | None) -> dict[str, int]:
    """Name -> bytes of each stored tensor in the type `target`; of a quantised weight all under that of its values."""
    if target is None:
        return {name: info.nbytes for name, info in checkpoint.tensors.items()}
    owners = owners_of(checkpoint.quantised.values())
    named = {name: weight.name for name, weight in owners.items() if weight.parts["values"] == name}
    kept = {name: named.get(name, "" if name in owners else name) for name in checkpoint.tensors}
    values = checkpoint.unquantised
    return {name: values[own].cast(target).nbytes if own in values else 0 for name, own in kept.items()}


def expert_bytes(sizes: Mapping[str, int], layer: SparseLayer) -> int:
    """Bytes of one expert of the layer and of its rows of the router, where tensors have these sizes."""
    own = (layer.expert_tensor(layer.computed[0], suffix) for suffix in layer.expert_tensors)
    shared = {*layer.router_tensors, *layer.cut}
    return sum(sizes[name] for name in own) + sum(sizes[name] for name in shared) // layer.num_experts


def head_bytes(checkpoint: Checkpoint, target: str | None) -> int:
    """Bytes of the output layer, or of the table that it shares, in the type `target`; None: as stored.

    Of a family that is not declared too: its largest matrix with a row for each token. 0 where it has none.
    """
    stated = [held.get("vocab_size") for held in (checkpoint.config, text_config(checkpoint.config))]
    tables = (info.cast(target) for info in checkpoint.tensors.values() if len(info.shape) == 2)
    return max((info.nbytes for info in tables if info.shape[0] in stated), default=0)


def decoding_bytes(checkpoint: Checkpoint, load: Load, target: str | None) -> tuple[int, int]:
    """Bytes of the attention cache and of the activations, by the formulas above.

    Raises:
        UnsupportedModelError: its class says nothing, or has no FFNs with hidden units.
        CheckpointError: config.json lacks a size.
    """
    width = itemsize(target or stored_dtype(checkpoint))
    if checkpoint.family is not None and checkpoint.runs_stock:
        return _mixture_bytes(checkpoint, load, width)
    layout = checkpoint.layout
    sequences = load.batch * (load.beam if any(layer.side == "decoder" for layer in layout.layers) else 1)
    rows = sequences * load.length * width
    kept = [layer for layer in layout.attentions if layer.kind != "encoder" and layer.count]
    one_of_each = {layer.kind: layer for layer in kept}.values()  # which a beam reorders
    cache = sum(2 * rows * _key_width(layout, layer) for layer in (*kept, *one_of_each))
    widths = [
        (shape[carrier.dim] // len(carrier.blocks), shape[1 - carrier.dim])
        for ffn in layout.ffns
        for name, carrier in ffn.carriers.items()
        if len(shape := layout.shapes.get(name, ())) == 2
    ]
    if not widths:
        raise UnsupportedModelError(
            f"{checkpoint.path}: what a model of type {checkpoint.model_type} takes while it decodes is not known",
            "Measure it: prunecli bench-latency.",
        )
    (widest, hidden), vocabulary = max(widths), layout.require_tables().vocabulary
    encoder = load.batch * load.length * (4 * hidden + widest) * width + rows * hidden
    return cache, encoder + sequences * vocabulary * 3 * 4


def _expert_values(checkpoint: Checkpoint, layer: SparseLayer) -> int:
    own = {layer.expert_tensor(layer.computed[0], suffix) for suffix in layer.expert_tensors}
    held = own or {*layer.stacked_tensors}
    weights = [weight for weight in checkpoint.quantised.values() if weight.parts["values"] in held]
    plain = held - owners_of(weights).keys()
    values = sum(checkpoint.unquantised[weight.name].numel for weight in weights)
    values += sum(checkpoint.tensors[name].numel for name in plain)
    return values if own else values // layer.num_experts


def _mixture_bytes(checkpoint: Checkpoint, load: Load, width: int) -> tuple[int, int]:
    cache, sequences = find_cache(checkpoint), load.batch * load.beam
    copied = max((layer.bytes(sequences, load.length, width) for layer in cache.layers), default=0)
    sparse = checkpoint.require_mixtures()
    hidden = checkpoint.tensors[sparse[0].router_tensors[0]].shape[1]
    expert = _expert_values(checkpoint, sparse[0])
    layers = text_layers(checkpoint).values()
    matrices = (info.shape[0] for own in layers for info in own.values() if len(info.shape) == 2)
    widest = max(*matrices, sparse[0].top_k * expert // (2 * hidden))
    vocabulary = stated_count(text_config(checkpoint.config), "vocab_size")
    rows = load.batch * load.length * (4 * hidden + widest) * width
    scores = sequences * vocabulary * 3 * 4
    return cache.bytes(sequences, load.length, width), rows + copied + scores


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The floating-point type that most bytes are stored in; quantised ones count as what they stand for."""
    totals: dict[str, int] = {}
    for info in checkpoint.unquantised.values():
        if is_float(info.dtype):
            totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
    return max(totals, key=lambda dtype: totals[dtype], default="F32")


def _key_width(layout: ModelLayout, layer: AttentionLayer) -> int:
    """All key heads side by side: no projection has fewer rows."""
    stored = layer.shared_tensors
    return min(
        layout.shapes[stored.get(name, name)][carrier.dim] * min(carrier.blocks) // sum(carrier.blocks)
        for name, carrier in layer.carriers.items()
        if name.endswith(".weight")
    )
