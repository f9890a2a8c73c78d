"""Memory that running layer by layer takes, and whether a given memory is enough.

On a CPU it is the whole process that must fit:

    process + resident + buffers x largest block + activations of one batch + batches' states + workspace

The states take what is left, then a file. On a GPU the sum, with CUDA's context instead of the process, is the GPU's
memory; states that do not all find room there are in the host's.
"""

from dataclasses import dataclass

import torch

from prunecli.errors import UsageError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.probe import WIDTH, head_counts, numbers
from prunecli.modules.logits import block_positions
from prunecli.modules.stages import EmptyModel
from prunecli.private import ATTENTION_FUNCTION
from prunecli.tensors.quantities import size_text

WORKSPACE = 128 << 20
"""Bytes for what is counted nowhere: compiled kernels, their scratch memory, threads, the allocator's slack."""

MIN_BUFFERS = 2
"""One for the layer at work, one for its experts or the next layer."""

BUFFERS = 3
"""One more, so that an expert is read while another computes."""

SPREAD = 16 << 20
"""Bytes by which what a process takes differs from run to run, about."""

MIN_STATES = 16 << 20
"""Bytes of states in memory below which a run would do little but wait for its file."""


@dataclass(frozen=True)
class Demand:
    """Bytes that a run needs beside its batches.

    Attributes:
        process: before any weight is read: Python, torch, the tokenizer; on a GPU CUDA's context.
        resident: weights outside of the layers.
        block: the largest layer (without experts) or expert.
    """

    process: int
    resident: int
    block: int

    def smallest(self, activations: int) -> int:
        """Smallest memory that `plan` accepts, in bytes."""
        fixed = self.process + self.resident + activations + WORKSPACE
        return fixed + MIN_BUFFERS * self.block + MIN_STATES

    def plan(self, memory: int, activations: int) -> tuple[int, int]:
        """Blocks of weights that `memory` holds at a time, and bytes left for the batches' states.

        Args:
            activations: bytes of the largest batch in one layer.

        Raises:
            UsageError: too few; it names the smallest that will do.
        """
        smallest = self.smallest(activations)
        for more in range(BUFFERS - MIN_BUFFERS, -1, -1):
            left = memory - smallest - more * self.block
            if left >= 0:
                return MIN_BUFFERS + more, MIN_STATES + left
        raise UsageError(
            f"`memory={size_text(memory)}` is too little: the smallest that works is "
            f"{size_text(smallest + SPREAD)} (process or CUDA context {size_text(self.process)}, "
            f"weights outside of the layers {size_text(self.resident)}, "
            f"{MIN_BUFFERS} x {size_text(self.block)} for layers, {size_text(activations)} for a batch)",
            "Give more, or shorter texts in smaller batches, or compute in bfloat16.",
        )


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, as far as activations depend on them.

    Attributes:
        d_model: width.
        ffn_dim: of the widest FFN.
        heads: of an attention.
        experts: of a sparse layer; 0 where there is none.
        top_k: experts per token.
        itemsize: bytes per value.
    """

    d_model: int
    ffn_dim: int
    heads: int
    experts: int
    top_k: int
    itemsize: int

    def activation_bytes(self, batch: int, length: int, keys: int, *, backward: bool = False) -> int:
        """Bytes that one layer needs for a batch, at most.

        With t = batch x length tokens: queries, keys, values, attention and residuals of t x d_model, the FFN before
        and after its activation, three times the attention weights; in a layer with experts the rows that they get and
        return, and in float32 the gates and the sum of the outputs.

        On the way back: the inputs that the layer's operations keep, and the gradients at work. Parameters get none, so
        that linear layers keep nothing: 24 values of d_model a token are those of norms, residuals, queries, keys,
        values and attention with their gradients; 10 of the FFN's width those of an activation that is made of several
        operations; attention weights are counted five times where they exist at all.

        Args:
            batch: sequences.
            length: padded tokens of each.
            keys: tokens that are attended to, of the same or of the encoder's sequences.
            backward: whether the layer is computed on the way back.
        """
        hidden, ffn, of_keys, scores, rows, gates = (24, 10, 8, 5, 7, 12) if backward else (10, 2, 4, 3, 2, 8)
        tokens = batch * length
        values = tokens * (hidden * self.d_model + ffn * self.ffn_dim) + batch * keys * of_keys * self.d_model
        values += scores * batch * self.heads * length * max(length, keys)
        sparse = rows * self.top_k * self.d_model * self.itemsize
        sparse += (2 * self.d_model + gates * self.experts) * 4
        return values * self.itemsize + (tokens * sparse if self.experts else 0)

    def output_bytes(self, vocabulary: int, tokens: int, *, backward: bool) -> int:
        """Bytes of a batch's logits and losses, at most: logits with and without their bias, in float32, logarithms.

        They are those of a block of positions; on the way back of two. And 12 values of d_model a token for what comes
        between the last layer and the logits.

        Args:
            vocabulary: values that a token's logits have.
            tokens: with padding.
            backward: whether gradients of all of them are held too.
        """
        cast = 4 if self.itemsize < 4 else 0
        forward = max(2 * self.itemsize, self.itemsize + cast + 4)
        per_value = max(forward, 12 + cast) if backward else forward
        held = min(tokens, block_positions(vocabulary) * (2 if backward else 1))
        return held * vocabulary * per_value + tokens * 12 * self.d_model * self.itemsize

    def state_bytes(self, tokens: int, real_tokens: int) -> int:
        """Bytes of a batch's state between layers, and of its rows in one with experts.

        Args:
            tokens: with padding.
            real_tokens: without.
        """
        rows = real_tokens * self.top_k * self.itemsize if self.experts else 0
        return (tokens * self.itemsize + rows) * self.d_model


def shape_of(checkpoint: Checkpoint, skeleton: EmptyModel, dtype: torch.dtype) -> Shape:
    """The sizes that activations depend on."""
    config = skeleton.model.config.get_text_config()
    heads = [*head_counts(config.to_dict()).values()]
    widths = [value for key, value in numbers(config.to_dict()) if WIDTH.search(key)]
    if checkpoint.runs_stock and getattr(config, ATTENTION_FUNCTION) != "eager":
        heads = [1]  # others make no weights of all pairs of positions, but there is a mask of them
    layers = [mixture.layer for mixture in skeleton.mixtures]
    return Shape(
        d_model=int(config.hidden_size),
        ffn_dim=max(widths, default=4 * int(config.hidden_size)),
        heads=max(heads, default=1),
        experts=max((layer.num_experts for layer in layers), default=0),
        top_k=max((layer.top_k for layer in layers), default=1),
        itemsize=dtype.itemsize,
    )
