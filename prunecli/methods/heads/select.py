"""Which heads to keep (1905.10650, 4 and 5): pure functions from importances to a selection.

All heads are sorted by their importance I_h, normalised within each layer (4.1); the lowest go first (4.2), over the
whole model or over some of its kinds of attention (5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, fsum, sqrt

import numpy as np

from prunecli.errors import UsageError
from prunecli.methods.heads.names import Normalize
from prunecli.model.attention import KINDS, AttentionKind, AttentionLayer
from prunecli.model.decision import Ranked
from prunecli.tensors.quantities import exact_share

Importance = Mapping[str, Mapping[int, float]]
"""Attention's name -> original id -> importance of the head."""


@dataclass(frozen=True)
class Request:
    """How many heads go, and which may.

    Attributes:
        ratio: fraction of the held heads of these kinds to remove; None where `count` says it.
        count: heads to remove, instead of `ratio`.
        kinds: the kinds of attention that may lose heads.
        minimum: heads that each of their layers keeps at least.
        normalize: `per-layer` divides by the l2 norm over the layer's heads (4.1), `none` compares as they are.
        uniform: the numbers of heads of which every layer keeps the same one, the largest that removes enough; None:
            each layer keeps what its heads are worth.
    """

    ratio: float | None = None
    count: int | None = None
    kinds: tuple[AttentionKind, ...] = KINDS
    minimum: int = 0
    normalize: Normalize = "per-layer"
    uniform: tuple[int, ...] | None = None


def normalized(importance: Importance) -> dict[str, dict[int, float]]:
    """I_h / sqrt(sum_h' I_h'^2) within each layer (4.1), over all heads that were scored; zeros stay zeros.

    Heads that a checkpoint no longer holds count in the norm, so that pruning in steps by the scores of the original
    removes the same heads as pruning at once.
    """
    found = {}
    for name, values in importance.items():
        # Relative to the largest first: squares of small gradients would vanish, and equal layers stay equal.
        largest = max((abs(value) for value in values.values()), default=0.0) or 1.0
        relative = {head: value / largest for head, value in values.items()}
        norm = sqrt(fsum(value**2 for value in relative.values())) or 1.0
        found[name] = {head: value / norm for head, value in relative.items()}
    return found


def removed_count(ratio: float, held: int) -> int:
    """Heads to remove: ceil(ratio x held), never less than asked.

    Raises:
        UsageError: the ratio is outside [0, 1).
    """
    return ceil(exact_share(ratio, "heads", 0.2) * held)


def select_heads(
    layers: Sequence[AttentionLayer], importance: Importance, request: Request
) -> dict[str, tuple[int, ...]]:
    """Choose the heads to keep: the least important go first, ties by place in the model.

    Args:
        layers: the checkpoint's attentions.
        importance: of at least every head that they hold.
        request: how many go, and which may.

    Returns:
        Attention's name -> original ids that stay, in the order in which they are stored.

    Raises:
        UsageError: a kind that the model lacks, a ratio outside [0, 1), or more heads to remove than may go.
    """
    present = [kind for kind in KINDS if any(layer.kind == kind for layer in layers)]
    for kind in request.kinds if request.kinds != KINDS else ():
        if kind not in present:
            raise UsageError(
                f"--attention {kind}: the model has no such attention.", f"It has {', '.join(present)}."
            )
    chosen = [layer for layer in layers if layer.kind in request.kinds]
    removed = _removed(chosen, request)
    values = normalized(importance) if request.normalize == "per-layer" else importance
    if request.uniform is not None:
        each = _each(chosen, removed, request)
        kept = {layer.name: layer.heads for layer in layers}
        return kept | {layer.name: _best(layer, values[layer.name], each) for layer in chosen}
    waiting = sorted(
        (values[layer.name][head], number, place)
        for number, layer in enumerate(chosen)
        for place, head in enumerate(layer.heads)
    )
    going: list[set[int]] = [set() for _ in chosen]
    left = removed
    for _, number, place in waiting:
        if left == 0:
            break
        layer = chosen[number]
        if len(layer.heads) - len(going[number]) > request.minimum:
            going[number].add(layer.heads[place])
            left -= 1
    gone = {layer.name: ids for layer, ids in zip(chosen, going, strict=True)}
    return {
        layer.name: tuple(head for head in layer.heads if head not in gone.get(layer.name, ()))
        for layer in layers
    }


def ranked_heads(
    layers: Sequence[AttentionLayer],
    importance: Importance | None,
    request: Request,
    kept: Mapping[str, Sequence[int]],
) -> tuple[Ranked, ...]:
    """The heads that were up for the choice, by what they were compared; importance None: by nothing."""
    values = normalized(importance or {}) if request.normalize == "per-layer" else importance or {}
    return tuple(
        Ranked.of(
            (layer.name, layer.stack.side, layer.layer),
            layer.heads,
            kept[layer.name],
            None if importance is None else [values[layer.name][head] for head in layer.heads],
            kind=layer.kind,
            cut="" if request.uniform is not None else "heads",
        )
        for layer in layers
        if layer.kind in request.kinds
    )


def _each(layers: Sequence[AttentionLayer], removed: int, request: Request) -> int:
    """How many heads each of `layers` keeps, so that all keep the same number and `removed` go at least."""
    held = [len(layer.heads) for layer in layers]
    most = min(*held, (sum(held) - removed) // len(held))
    able = [number for number in request.uniform or () if max(request.minimum, 1) <= number <= most]
    if not able:
        choices = ", ".join(map(str, request.uniform or ())) or "none"
        raise UsageError(
            f"--uniform: at most {most} heads may stay in each layer, and at least {max(request.minimum, 1)} have to; "
            f"a stock model may keep {choices}.",
            "Remove fewer heads, lower --min-per-layer, or leave --uniform out.",
        )
    return max(able)


def _best(layer: AttentionLayer, values: Mapping[int, float], number: int) -> tuple[int, ...]:
    """The most important heads of a layer, in the order in which they are stored; of equal ones the later stay."""
    order = sorted(range(len(layer.heads)), key=lambda place: (values[layer.heads[place]], place))
    return tuple(layer.heads[place] for place in sorted(order[len(order) - number :]))


def _removed(layers: Sequence[AttentionLayer], request: Request) -> int:
    """How many heads of `layers` go; refuses what their minimum forbids."""
    held = sum(len(layer.heads) for layer in layers)
    removed = removed_count(request.ratio, held) if request.ratio is not None else request.count or 0
    free = sum(max(len(layer.heads) - request.minimum, 0) for layer in layers)
    if not 0 <= removed <= free:
        bound = f", of which each layer keeps {request.minimum}" if request.minimum else ""
        raise UsageError(
            f"{removed} heads would go; the {len(layers)} attentions hold {held}{bound}: at most {free} can.",
            "Remove fewer heads" + (", or lower --min-per-layer." if request.minimum else "."),
        )
    return removed


def random_importance(original: Mapping[str, int], seed: int) -> dict[str, dict[int, float]]:
    """Uniform in (0, 1], the baseline; `original` counts the heads of each original attention."""
    generator = np.random.default_rng(seed)
    return {
        name: dict(enumerate((1.0 - generator.random(heads)).tolist())) for name, heads in original.items()
    }
