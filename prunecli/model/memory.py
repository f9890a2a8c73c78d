"""What a whole model takes in memory: its weights in a type, and what decoding holds beside them.

With b = batch, s = batch x beam sequences, n tokens a sequence (source and target alike), d = the width of the hidden
states, k = that of an attention's keys (d, or less where query heads share them) and w bytes per value:

- attention cache: decoder layers x 2 x attentions x s x n x k x w (keys and values, own and cross), and once more for
  the layer that a beam reorders;
- encoder, or the prompt of a model without one: b x n x (4 d + widest FFN) x w, and its output for every beam,
  s x n x d x w;
- scores: s x vocabulary x 3 x 4 (logits, their log-softmax and the beam's sums in float32).

A model that is an encoder alone does not decode: one batch goes through it, and beams do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prunecli.architectures.records import Attention
from prunecli.model.declared import Sizes
from prunecli.model.operations import model_dim
from prunecli.tensors.dtypes import is_float, itemsize

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class Load:
    """What decodes: `batch` sentences at a time, `beam` hypotheses each, of up to `length` tokens."""

    batch: int = 1
    beam: int = 4
    length: int = 128


def weight_bytes(checkpoint: Checkpoint, target: str | None) -> int:
    """Bytes of all tensors, the floating-point ones in the type `target` (None: as stored)."""
    return sum(info.cast(target).nbytes for info in checkpoint.tensors.values())


def decoding_bytes(checkpoint: Checkpoint, load: Load, target: str | None) -> tuple[int, int]:
    """Bytes of the attention cache and of the activations, by the module's formulas.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: config.json lacks a size.
    """
    family = checkpoint.require_architecture()

    def size(key: str) -> int:
        return checkpoint.layout.sizes.count(key)

    width = itemsize(target or stored_dtype(checkpoint))
    decoders = [stack for stack in family.stacks if stack.side == "decoder"]
    sequences = load.batch * (load.beam if decoders else 1)
    rows = sequences * load.length * width
    cache = sum(
        2 * rows * _key_width(checkpoint.layout.sizes, attention) * (size(stack.depth) + 1)
        for stack in decoders
        for attention in stack.attentions
    )
    hidden = size(model_dim(family))
    widest = max(size(stack.ffn.width) for stack in family.stacks)
    encoder = load.batch * load.length * (4 * hidden + widest) * width + rows * hidden
    return cache, encoder + sequences * size("vocab_size") * 3 * 4


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The floating-point type that most bytes are stored in."""
    totals: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        if is_float(info.dtype):
            totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
    return max(totals, key=lambda dtype: totals[dtype], default="F32")


def _key_width(sizes: Sizes, attention: Attention) -> int:
    """All key heads side by side: no projection has fewer rows."""
    return min(
        sizes.count(spec.shape[spec.heads.axis]) * min(blocks) // sum(blocks)
        for spec in attention.tensors
        if spec.heads is not None and len(spec.shape) == 2
        for blocks in [list(map(sizes.count, spec.heads.blocks))]
    )
