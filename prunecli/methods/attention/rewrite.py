"""What each tensor of the checkpoint with shared attentions is made of: pure, nothing is read but names and shapes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from prunecli.methods.attention.arrange import AttentionPlan
from prunecli.model.changes import AttentionChange
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.stream import Copy, Output, Sum


def rewrite_attention(checkpoint: Checkpoint, plan: AttentionPlan) -> Rewrite:
    """The checkpoint with its attentions as planned, its tensors in the order of the source.

    A removed attention goes with its norms and, where no layer is left that uses it, its table of positions; each layer
    that shares one keeps its own norms.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: config.json says what cannot be.
    """
    target = None if plan.dtype is None else parse_dtype(plan.dtype)
    layers = {layer.name: layer for layer in checkpoint.layout.attentions}
    made: dict[str, list[Output]] = defaultdict(list)
    for group in plan.groups:
        sources = zip(*(layers[name].tensor_names for name in group.sources), strict=True)
        for name, alike in zip(layers[group.owner].tensor_names, sources, strict=True):
            if alike[0] not in checkpoint.tensors:  # another condition's, or of no head
                continue
            info = checkpoint.info(alike[0])
            parts = tuple(Copy(source) for source in alike)
            expression = parts[0] if len(parts) == 1 else Sum(parts, (1 / len(parts),) * len(parts))
            made[alike[0]].append(Output(name, info.cast(target).dtype, info.shape, expression))
    gone = {name for layer in layers.values() for name in layer.tensor_names}
    for name in plan.removed:
        layer = layers[name]
        tables = (spec.name for spec in layer.spec.tensors if spec.first)
        gone |= {*layer.norm_tensors, *(f"{name.removesuffix(layer.spec.name)}{table}" for table in tables)}
    outputs: list[Output] = []
    for name, info in checkpoint.tensors.items():
        if name in gone:
            outputs += made.get(name, ())
        else:
            outputs.append(Output(name, info.cast(target).dtype, info.shape, Copy(name)))
    structure = checkpoint.structure
    attention = {name: AttentionChange(removed=True) for name in plan.removed}
    heads: dict[str, tuple[int, ...]] = {}  # those of a shared attention are its owner's
    original = dict(structure.original_heads)
    for group in plan.groups:
        attention |= {name: AttentionChange(shared_with=group.owner) for name in group.members[1:]}
        layer = layers[group.owner]
        if group.owner in structure.heads or group.heads != tuple(range(layer.stated_heads)):
            heads[group.owner] = group.heads
            original.setdefault(group.owner, layer.original_heads)
    in_order = {name: attention[name] for name in layers if name in attention}
    structure = replace(structure, attention=in_order, heads=heads, original_heads=original)
    return rewritten(checkpoint, structure, tuple(outputs), plan.step)
