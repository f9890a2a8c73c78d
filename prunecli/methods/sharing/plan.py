"""From a checkpoint and options to a plan: which FFNs or attentions are merged, which go, which hidden units stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prunecli.errors import CheckpointError, UsageError
from prunecli.methods.sharing.arrange import Layer, SharePlan, arrange, kind_of
from prunecli.methods.sharing.hidden_units import unit_norms
from prunecli.methods.sharing.options import (
    AttentionOptions,
    FfnOptions,
    SharingOptions,
    chosen_configuration,
)
from prunecli.model.axes import Axis, axis_name
from prunecli.model.decision import Origin
from prunecli.model.history import given, history_step
from prunecli.results.unit_scores import Scores
from prunecli.selection.select import Budget, select
from prunecli.selection.selection import decision_of

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

Activations = Callable[[SharePlan], Scores]
"""Measures hidden units in the model of a plan that narrows nothing."""


def plan_attention(checkpoint: Checkpoint, options: AttentionOptions) -> SharePlan:
    """Choose which attentions to merge and which to drop.

    Raises:
        UnsupportedModelError: the family is not declared.
        UsageError: options that contradict each other, or that this model cannot hold.
    """
    return _plan(checkpoint, checkpoint.layout.attentions, options)


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
    plan = _plan(checkpoint, checkpoint.layout.ffns, options)
    layers: Mapping[str, Any] = plan.layers
    narrowed = plan.narrowed
    if not narrowed:
        if options.keep_units is not None:
            raise UsageError(
                "`keep_units`: no FFN gets narrower.", "Leave it out, or give a smaller `width`."
            )
        return plan
    tokens: Mapping[str, int] = {}
    if options.keep_units == "norms":
        checkpoint.check()
        worth = {
            axis_name(owner, "unit"): unit_norms(checkpoint, layers, group)
            for owner, group in narrowed.items()
        }
    elif activations is None:
        remedy = "Give `data` or `files`; or choose by the weights alone: `keep_units=norms`."
        raise UsageError("An FFN gets narrower: which hidden units stay is chosen by text.", remedy)
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
    return bool(_plan(checkpoint, checkpoint.layout.ffns, options).narrowed)


def _plan(checkpoint: Checkpoint, layers: Sequence[Layer], options: SharingOptions) -> SharePlan:
    """The plan, but for the hidden units that stay."""
    if not layers:
        raise CheckpointError(f"{checkpoint.path}: config.json names no layers", "Copy the file again.")
    chosen = chosen_configuration(options, {layer.stack.side for layer in layers})
    arguments = {**options.recorded(), "preset": chosen.name or None, "text": options.text}
    if isinstance(options, FfnOptions):
        if chosen.match and options.width is None:
            options = options.model_copy(update={"width": "match"})
        arguments |= {
            "encoder": None if chosen.name else chosen.encoder,
            "decoder": None if chosen.name else chosen.decoder,
            "width": options.width,
            "seed": options.seed,
        }
    plan = arrange(layers, options, chosen)
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
    shared = [layer for layer in layers if getattr(chosen, kind_of(layer)) == "share"]
    windows = {getattr(layer, "window", "") for layer in shared}
    if len(windows) > 1:
        reasons.append(f"Layers share with layers of their own window alone ({', '.join(sorted(windows))}).")
    step = history_step(f"share-{plan.part.lower()}", checkpoint, given(arguments))
    return replace(plan, step=step, reasons=tuple(reasons))
