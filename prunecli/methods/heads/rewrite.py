"""What each tensor of the pruned checkpoint is made of: pure, nothing is read but names and shapes.

Heads are pruned by dropping their part of the projections: rows of query, key and value, columns of the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prunecli.errors import UsageError
from prunecli.methods.heads.plan import HeadPlan
from prunecli.model.attention import AttentionLayer, HeadPlaces
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.stream import Copy, Output, Slices, joined


def rewrite_heads(checkpoint: Checkpoint, plan: HeadPlan) -> Rewrite:
    """The checkpoint with only the heads that the plan keeps, its tensors in the order of the source.

    An attention that keeps all of its heads in their order is copied as it is. Of one that keeps none, the tensors
    that would be empty are left out; the bias of its output projection stays.

    Raises:
        UsageError: no such attention, or a head that it does not hold.
    """
    target = None if plan.dtype is None else parse_dtype(plan.dtype)
    layers = {layer.name: layer for layer in checkpoint.layout.own_attentions}
    changed: dict[str, tuple[int, ...]] = {}
    for name, ids in plan.kept.items():
        _check(layers, name, ids)
        if tuple(ids) != layers[name].heads:
            changed[name] = tuple(ids)
    cut = {
        tensor: (axis, layers[name], ids)
        for name, ids in changed.items()
        for tensor, axis in layers[name].tensors.items()
    }
    outputs = []
    for name, info in checkpoint.tensors.items():
        stored = info.cast(target).dtype
        if name not in cut:
            outputs.append(Output(name, stored, info.shape, Copy(name)))
            continue
        axis, layer, ids = cut[name]
        if ids:
            ranges = head_ranges(axis, layer.heads, ids, info.shape[axis.axis])
            shape = list(info.shape)
            shape[axis.axis] = sum(stop - start for start, stop in ranges)
            outputs.append(Output(name, stored, tuple(shape), Slices(name, axis.axis, ranges)))
    structure = checkpoint.structure
    if changed:
        structure = structure.keeping_heads(changed, {name: layers[name].original_heads for name in changed})
    return rewritten(checkpoint, structure, tuple(outputs), plan.step, plan.decision)


def head_ranges(
    places: HeadPlaces, held: Sequence[int], kept: Sequence[int], size: int
) -> tuple[tuple[int, int], ...]:
    """Where the kept heads lie on an axis of length `size`: index ranges (start, stop), neighbours joined.

    Args:
        places: the blocks of heads on it.
        held: original ids of the heads that lie there, in their order.
        kept: those that stay, in their new order.
        size: length of the axis: heads x the widths of one in all blocks.
    """
    unit = places.unit(size, len(held))
    found, before = [], 0
    for block in places.blocks:
        starts = (before + held.index(head) * block * unit for head in kept)
        found += [(start, start + block * unit) for start in starts]
        before += len(held) * block * unit
    return tuple(joined(found))


def _check(layers: Mapping[str, AttentionLayer], name: str, ids: Sequence[int]) -> None:
    if name not in layers:
        raise UsageError(f"{name} is not an attention of this model.", f"It has {', '.join(layers)}.")
    stray = sorted(set(ids) - set(layers[name].heads))
    if stray or len(set(ids)) != len(ids):
        what = f"has no head {stray[0]}" if stray else "cannot keep a head twice"
        raise UsageError(f"{name} {what}.", "Ids are those of the original model.")
