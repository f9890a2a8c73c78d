"""How much of a model each of several checkpoints has lost, and in which way: the abscissa of a curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prunecli.checkpoint.attention import KINDS, AttentionLayer, attention_layers
from prunecli.checkpoint.layout import sparse_layers
from prunecli.checkpoint.reader import Checkpoint

ALL = "all"


@dataclass(frozen=True)
class Removed:
    """What one checkpoint has lost.

    Attributes:
        fraction: in [0, 1]: 1 - kept / original.
        line: checkpoints that were reduced in the same way have the same: the attention ("encoder", "decoder",
            "cross", or "all"), or how experts were chosen; None for a checkpoint that lost nothing, which every line
            starts from.
    """

    fraction: float
    line: str | None


Unit = Literal["heads", "experts", "parameters"]


def removed(checkpoints: Sequence[Checkpoint]) -> tuple[Unit, list[Removed]]:
    """What was removed from the checkpoints, and how much of it from each.

    Heads where any has lost heads, else experts where any has lost experts, else parameters, which are counted
    against the first checkpoint's. Where the last pruning of heads was of some attentions only (1905.10650, section
    5), the fraction is of the heads of these.
    """
    if any(checkpoint.structure.heads for checkpoint in checkpoints):
        return "heads", [_heads(checkpoint) for checkpoint in checkpoints]
    if any(checkpoint.structure.experts for checkpoint in checkpoints):
        return "experts", [_experts(checkpoint) for checkpoint in checkpoints]
    sizes = [sum(info.numel for info in checkpoint.tensors.values()) for checkpoint in checkpoints]
    fractions = [1 - size / sizes[0] for size in sizes]
    return "parameters", [Removed(fraction, ALL if fraction else None) for fraction in fractions]


def _heads(checkpoint: Checkpoint) -> Removed:
    if not checkpoint.structure.heads:
        return Removed(0.0, None)
    kinds = _arguments(checkpoint, "prune-heads").get("attention") or KINDS
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    layers: Sequence[AttentionLayer] = attention_layers(checkpoint)
    present = {layer.kind for layer in layers}
    chosen = [layer for layer in layers if layer.kind in kinds] or layers
    kept, original = sum(layer.num_heads for layer in chosen), sum(layer.original_heads for layer in chosen)
    return Removed(1 - kept / original, ALL if present.issubset(kinds) else ", ".join(map(str, kinds)))


def _experts(checkpoint: Checkpoint) -> Removed:
    if not checkpoint.structure.experts:
        return Removed(0.0, None)
    layers = sparse_layers(checkpoint)
    kept, original = (
        sum(layer.num_experts for layer in layers),
        sum(layer.original_experts for layer in layers),
    )
    arguments = _arguments(checkpoint, "prune-experts")
    line = arguments.get("granularity") or arguments.get("metric") or ALL
    return Removed(1 - kept / original, str(line))


def _arguments(checkpoint: Checkpoint, command: str) -> Mapping[str, Any]:
    """The arguments of the last step of this command."""
    for step in reversed(checkpoint.structure.history):
        if step.get("command") == command and isinstance(step.get("arguments"), Mapping):
            found: Mapping[str, Any] = step["arguments"]
            return found
    return {}
