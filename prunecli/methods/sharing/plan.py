"""From a checkpoint and options to a plan: which FFNs or attentions are merged, which go, which hidden units stay."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.methods.sharing.arrange import Group, SharePlan, arrange
from prunecli.methods.sharing.options import (
    AttentionOptions,
    FfnOptions,
    SharingOptions,
    chosen_configuration,
)
from prunecli.methods.units import unit_norms
from prunecli.model.axes import Axis, axis_name, module_of
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Origin
from prunecli.model.history import given, history_step
from prunecli.model.parts import AttentionLayer, FfnLayer
from prunecli.model.rewrite import Rewrite, replacing, rewritten
from prunecli.model.structure import KeptUnits, Structure
from prunecli.results.unit_scores import Array, Scores
from prunecli.selection.select import Budget, select
from prunecli.selection.selection import decision_of
from prunecli.tensors.stream import (
    Concat,
    Copy,
    Expression,
    Output,
    Sum,
    joined,
    noise,
    shape_of,
    zeros,
)

Activations = Callable[[SharePlan], Scores]
"""Measures hidden units in the model of a plan that narrows nothing."""


def plan_attention(checkpoint: Checkpoint, options: AttentionOptions) -> SharePlan:
    """Choose which attentions to merge and which to drop.

    Raises:
        UnsupportedModelError: the family is not declared.
        UsageError: options that contradict each other, or that this model cannot hold.
    """
    return _plan(checkpoint, options)


def plan_ffn(
    checkpoint: Checkpoint, options: FfnOptions, activations: Activations | None = None
) -> SharePlan:
    """Choose which FFNs to merge and which to drop.

    Args:
        checkpoint: the source; its weights are read where hidden units are chosen by their norms.
        options: see there.
        activations: called where hidden units are chosen by their activations, with the plan of the merged FFNs before
            any of them gets narrower.

    Raises:
        UnsupportedModelError: the family is not declared, or mixtures of experts would have to be merged.
        UsageError: options that contradict each other, or that this model cannot hold.
        CheckpointError: the weights are damaged.
    """
    plan = _plan(checkpoint, options)
    layers: Mapping[str, Any] = plan.layers
    narrowed = plan.narrowed
    if not narrowed:
        if options.keep_units is not None:
            raise UsageError(
                "`keep_units`: no FFN gets narrower.", "Leave it out, or give a smaller `width`."
            )
        return plan
    tokens = {}
    if options.keep_units == "norms":
        checkpoint.check()
        worth = {
            axis_name(owner, "unit"): group_norms(checkpoint, layers, group)
            for owner, group in narrowed.items()
        }
    elif activations is None:
        remedy = "Give `data` or `files`; or choose by the weights alone: `keep_units=norms`."
        raise UsageError("An FFN gets narrower: which hidden units are kept is chosen by text.", remedy)
    else:
        whole = (replace(group, width=max(group.width, group.init_width)) for group in plan.groups)
        measured = activations(replace(plan, groups=tuple(whole)))
        worth, tokens = measured.importance(), measured.tokens
    axes = []
    for owner, group in narrowed.items():
        ids = tuple(range(group.init_width))
        layer = layers[owner]
        axes.append(Axis(axis_name(owner, "unit"), "unit", ids, group.init_width, layer.side, layer.layer))
    scores = {axis.name: worth[axis.name] for axis in axes}
    widths = {axis.name: narrowed[axis.module].width for axis in axes}
    kept = select(axes, scores, Budget(keep=widths))
    units = {axis.module: kept[axis.name] for axis in axes}
    decision = decision_of(
        axes,
        kept,
        scores,
        tokens=tokens,
        metric=options.keep_units,
        how="the highest of each FFN as init makes it are kept",
        origin=Origin.of_text(options.text),
    )
    return replace(plan, units=units, decision=decision)


def narrows(checkpoint: Checkpoint, options: FfnOptions) -> bool:
    """Whether an FFN gets narrower, so that some hidden units go.

    Raises:
        PruneError: as `plan_ffn`.
    """
    return bool(_plan(checkpoint, options).narrowed)


def _plan(checkpoint: Checkpoint, options: SharingOptions) -> SharePlan:
    """The plan, but for the hidden units that stay."""
    layout = checkpoint.layout
    layers = layout.ffns if options.part == "FFN" else layout.attentions
    if not layers:
        raise UnsupportedModelError(
            f"{checkpoint.path}: the model has no {options.part} that can be shared or removed"
        )
    sides = {layer.side for layer in layers}
    chosen = chosen_configuration(options, sides)
    arguments = {**options.recorded(), "preset": chosen.name or None, "text": options.text}
    if isinstance(options, FfnOptions):
        if chosen.match and options.width is None:
            options = options.updated(width="match")
        arguments |= {side: None if chosen.name else getattr(chosen, side) for side in sorted(sides)}
        arguments |= {
            "width": options.width,
            "seed": options.seed,
        }
    plan = arrange(layers, options, chosen, layout.shapes)
    reasons = []
    if options.preset is None and chosen.name:
        reasons.append(f"No `preset` given: {chosen.name}.")
    inits = {group.init for group in plan.groups if len(group.sources) > 1}
    if options.init is None and "concat" in inits:
        reasons.append(
            "No `init` given: a shared FFN is made of those that it replaces side by side (concat)."
        )
    if options.init is None and "mean" in inits:
        reasons.append(f"No `init` given: a shared {plan.part} is the mean of those that it replaces.")
    shared = [layer for layer in layers if getattr(chosen, layer.kind) == "share"]
    windows = {getattr(layer, "window", "") for layer in shared}
    if len(windows) > 1:
        reasons.append(f"Layers share with layers of their own window alone ({', '.join(sorted(windows))}).")
    step = history_step(f"share-{plan.part.lower()}", checkpoint, given(arguments))
    return replace(plan, step=step, reasons=tuple(reasons))


def rewrite_shared(checkpoint: Checkpoint, plan: SharePlan) -> Rewrite:
    """The checkpoint with its FFNs or attentions as planned, its tensors in the order of the source.

    What stays as it is, is copied. What is removed goes with its norms and, where no layer is left that uses it, an
    attention's table of positions; each layer that shares keeps its own norms.

    Raises:
        CheckpointError: tensors that config.json does not ask for, or lack of some.
        UnsupportedModelError: the family is not declared.
    """
    checkpoint.check()
    layers: Mapping[str, Any] = plan.layers
    own = {name: layer.tensor_names for name, layer in layers.items()}
    made = defaultdict(list)
    for group in plan.groups:
        for name, *sources in zip(own[group.owner], *(own[name] for name in group.sources), strict=True):
            if plan.part == "FFN":
                units, seed = plan.units.get(group.owner), f"{plan.seed}:{name}"
                expression = ffn_tensor(checkpoint, layers, group, name, units, seed)
            elif sources[0] in checkpoint.tensors:
                expression = weighted_sum([Copy(source) for source in sources], 1 / len(sources))
            else:  # config.json does not ask for this tensor, or no head is left
                continue
            dtype = checkpoint.info(sources[0]).dtype
            made[sources[0]].append(Output(name, dtype, shape_of(checkpoint, expression, name), expression))
    gone = {name for names in own.values() for name in names}
    structure = _structure(checkpoint, plan, layers)
    result = checkpoint.layout.changed(structure)  # it says which norms go with what is removed
    parts = (*result.ffns, *result.attentions)
    for layer in parts:
        if layer.name not in plan.removed:
            continue
        gone.update(layer.norm_tensors)
        if isinstance(layer, AttentionLayer):
            gone |= {f"{layer.prefix}{spec.name}" for spec in layer.spec.tensors if spec.first}
    outputs = replacing(checkpoint, {**dict.fromkeys(gone, ()), **made})
    return rewritten(checkpoint, structure, outputs, plan.step, plan.decision, plan.dtype)


def _structure(checkpoint: Checkpoint, plan: SharePlan, layers: Mapping[str, Any]) -> Structure:
    """The source's structure with what the plan shares, removes and resizes."""
    structure = checkpoint.structure
    shared = {name: group.owner for group in plan.groups for name in group.members[1:]}
    widths, axes = {}, dict(structure.axes)
    for name in layers:  # heads of a shared attention are its owner's
        axes.pop(axis_name(name, "head"), None)
    for group in plan.groups:
        layer = layers[group.owner]
        if plan.part == "FFN":
            if group.width != layer.stated:
                widths[group.owner] = group.width
            continue
        axis, held = axis_name(group.owner, "head"), layers[group.sources[0]].heads
        if axis in structure.axes or held != tuple(range(layer.stated)):
            axes[axis] = KeptUnits(held, layer.original_heads)
    return replace(structure.changing(layers, shared, plan.removed, widths), axes=axes)


def ffn_tensor(
    checkpoint: Checkpoint,
    layers: Mapping[str, FfnLayer],
    group: Group,
    name: str,
    units: Sequence[int] | None = None,
    seed: str = "",
) -> Expression:
    """One tensor of a group's FFN, new hidden units and all; a copy where the FFN stays as it is.

    An FFN is FFN(x) = act(x W1 + b1) W2 + b2 (eq. 1), a gated one (act(x W1) * x V) W2. With k FFNs side by side in
    one of k x d_ff hidden units, W1 stacked, W2 joined and b2 added up, the sum of their outputs is exact.

    New hidden units have small random inputs (of the standard deviation that the model's weights are drawn with at its
    making) and outputs of zero: what is computed stays the same, and the first step of training moves them.

    Args:
        checkpoint: the source.
        layers: all of its FFNs by name.
        group: the group of the FFN.
        name: full name of the tensor.
        units: the hidden units of the initialisation that stay. If None, all.
        seed: seed of new hidden units.
    """
    names = [source + name.removeprefix(group.owner) for source in group.sources]
    if not group.is_merged:
        return Copy(names[0])
    member = layers[group.owner]
    is_last, carrier = module_of(name) == member.output, member.carriers.get(name)
    weight = group.scale if is_last else 1.0
    if group.init != "concat":
        weight /= len(names)
    if carrier is None:  # the bias of the output
        return weighted_sum([Copy(own) for own in names], weight)
    axis, blocks = carrier.dim, len(carrier.blocks)
    parts: list[Expression] = []
    for block in range(blocks):  # of a fused tensor, which holds the hidden units several times
        held: list[Expression] = []
        before = 0
        for source in names:
            width = checkpoint.info(source).shape[axis] // blocks
            own = (
                range(width)
                if units is None
                else [unit - before for unit in units if unit - before in range(width)]
            )
            places = joined((block * width + unit, block * width + unit + 1) for unit in own)
            if units is None and blocks == 1:
                held.append(Copy(source))
            elif own:
                held.append(Copy(source, ((axis, tuple(places)),)))
            if group.init == "concat":
                before += width
        together = [[part] for part in held] if group.init == "concat" else [held]
        parts += [weighted_sum(summed, weight) for summed in together]
        if group.width > group.init_width:
            shape = list(shape_of(checkpoint, parts[-1], name))
            shape[axis] = group.width - group.init_width
            if is_last or len(shape) == 1:
                parts.append(zeros(tuple(shape)))
            else:
                own_seed = f"{seed}:{block}" if block else seed
                number = int.from_bytes(hashlib.sha256(own_seed.encode()).digest()[:8], "little")
                parts.append(noise(tuple(shape), initial_std(checkpoint.config), number))
    return parts[0] if len(parts) == 1 else Concat(axis, tuple(parts))


def initial_std(config: Mapping[str, Any]) -> float:
    """Standard deviation with which the model's weights are drawn at its making."""
    value = config.get("initializer_range", config.get("init_std"))
    return float(value) if isinstance(value, (int, float)) and 0 < value < 1 else 0.02


def weighted_sum(parts: Sequence[Expression], weight: float) -> Expression:
    """`weight` times the sum; one part by 1 is itself."""
    return parts[0] if len(parts) == 1 and weight == 1 else Sum(tuple(parts), weight)


def group_norms(checkpoint: Checkpoint, layers: Mapping[str, FfnLayer], group: Group) -> Array:
    """`unit_norms` of the FFN that the group's initialisation makes: ||row of W1|| x ||column of W2||."""
    carriers = layers[group.owner].carriers
    made = partial(ffn_tensor, checkpoint, layers, replace(group, width=group.init_width))
    matrices = {name: carrier for name, carrier in carriers.items() if name.endswith("weight")}
    return unit_norms(checkpoint, matrices, group.init_width, made)
