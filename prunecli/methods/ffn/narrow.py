"""Choose the hidden units of each FFN to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.methods.options import NarrowOptions
from prunecli.methods.units import (
    Ranking,
    TextRun,
    by_scores,
    drawn,
    kept_by_file,
    measured,
    plan,
    unit_norms,
)
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.find_axes import axes_of
from prunecli.model.probe import outputs
from prunecli.results.unit_scores import Array, Scores
from prunecli.selection.select import Budget
from prunecli.selection.selection import Selection
from prunecli.text.choice import Dataset

NORMS_WARNING = (
    "Warning: norms looks at no text. On SmolLM2-135M it raised the perplexity of WikiText-2 from 15.4 to 927,500 "
    "at `ratio=0.25`; activation-norm with `files` raised it to 22.8."
)
GROUPED = 8
"""Values of 16 bits in 16 bytes, what torch's grouped product asks of rows."""


def plan_widths(checkpoint: Checkpoint, options: NarrowOptions, run: TextRun | None = None) -> Selection:
    """Choose the hidden units to keep. An FFN that several layers run counts once.

    Args:
        checkpoint: the source; its weights are read where units are scored by norms.
        run: text to run the model on, where units are scored by their activations and no scores are given.

    Raises:
        UnsupportedModelError: the family is not declared, a side has mixtures of experts, or an FFN is quantised.
        UsageError: options that contradict each other, or that leave an FFN without units.
        CheckpointError: the weights are damaged.
        StatisticsError: files of scores that are damaged or of another model.
        PruneError: text or a model that cannot be used.
    """
    options.check_options()
    axes = _chosen(checkpoint, options)
    for name in (name for axis in axes for name in axis.carriers if name in checkpoint.quantised):
        # Norms of stored values would not be those of the weights.
        raise checkpoint.quantised_refusal(name)
    if options.keep is not None:
        return kept_by_file(checkpoint, options, axes)
    budget = _budget(axes, options)
    if options.metric != "random":
        checkpoint.check()  # weights of other shapes than config.json says would be added up
    metric: str = options.metric or "activation-norm"
    text = None
    if metric == "random":
        ranking = drawn(axes, options.seed)
    elif metric == "norms":
        ranking = Ranking({axis.name: _norms(checkpoint, axis) for axis in axes}, metric)
    else:

        def measure(data: Dataset, run: TextRun) -> Scores:
            from prunecli.methods.measuring import (
                measure_activations,  # imports torch
                measure_gradients,
            )

            if metric == "gradient":
                return measure_gradients(checkpoint, data, {"unit": axes}, run.running, run.progress)["unit"]
            return measure_activations(checkpoint, data, run, metric, axes if options.experts else ())

        scores, text = measured(checkpoint, options, metric, run, measure, axes=axes, without="norms")
        values, metric = scores.picked(axes), options.metric or scores.method
        if metric == "activation-norm":
            values = {
                axis.name: values[axis.name] * _norms(checkpoint, axis, output_only=True) for axis in axes
            }
        ranking = by_scores(scores, values, options, metric, text=text)
    arguments = {
        "ratio": options.share,
        "metric": metric,
        "text": text,
    }
    owner = "expert" if options.experts else "FFN"
    of = f" of each {owner}" if options.uniform else " of all FFNs together"
    by_share = not options.uniform
    return plan(checkpoint, options, axes, budget, ranking, arguments, of=of, by_share=by_share)


def _chosen(checkpoint: Checkpoint, options: NarrowOptions) -> list[Axis]:
    """The hidden units of the FFNs, or experts, that get narrower."""
    axes, layers = axes_of(checkpoint, "unit"), checkpoint.layout.ffns
    if options.experts:
        own = [axis for axis in axes if axis.keys]
        if options.side is not None:
            raise UsageError("`side` does not go with `experts`: all get narrower alike.", "Leave it out.")
        if not own:
            raise UnsupportedModelError(
                f"{checkpoint.path}: no key of config.json counts hidden units of experts, or the model has none.",
                "Remove whole experts: prunecli prune-experts.",
            )
        return own
    has_experts = checkpoint.layout.family.mixture is not None
    if options.side is not None and options.side not in [layer.side for layer in layers]:
        raise UsageError(f"`side={options.side}`: the model has no {options.side}.", "Leave it out.")
    ffns = [
        layer
        for layer in layers
        if options.side in (None, layer.side) and (layer.carriers or (layer.is_sparse and has_experts))
    ]
    dense = [layer for layer in ffns if not layer.is_sparse]
    if not dense or (len(dense) < len(ffns) and not options.dense_only):
        if not ffns:
            raise UnsupportedModelError(
                "No FFN was found that could get narrower: no key of config.json changes its width alone (BLOOM's and "
                "MPT's is four times the hidden size).",
                "prune-layers removes whole layers; `prunecli inspect` shows what can be removed.",
            )
        remedy = f"Add `dense_only` to narrow the other {len(dense)} and leave these."
        raise UnsupportedModelError(
            f"{len(ffns) - len(dense)} of the {len(ffns)} FFNs are mixtures of experts.",
            remedy if dense else "Narrow the experts with `experts`, or remove some: prunecli prune-experts.",
        )
    owners = {layer.owner for layer in dense}
    for layer in layers:
        if options.side not in (None, layer.side) and layer.owner in owners:
            raise UsageError(
                f"`side={options.side}`: {layer.name} runs an FFN of that side too.", "Leave `side` out."
            )
    return [axis for axis in axes if axis.module in owners]


def _norms(checkpoint: Checkpoint, axis: Axis, *, output_only: bool = False) -> Array:
    """The product over the matrices of the l2 norm of a unit's part: ||row of W1|| x ||column of W2||.

    Args:
        output_only: ||column of W2|| alone, the norm of what an activation of 1 adds to the output.

    Returns:
        `[units]`, float64. If experts are stacked, norms are taken over all of them together.
    """
    matrices = [name for name in axis.carriers if len(checkpoint.info(name).shape) > 1]
    if output_only:
        matrices = outputs(axis.carriers)
    return unit_norms(checkpoint, {name: axis.carriers[name] for name in matrices}, axis.count)


def _budget(axes: Sequence[Axis], options: NarrowOptions) -> Budget:
    """Number of hidden units to remove.

    Raises:
        UsageError: an FFN has fewer than stay, or they cannot go evenly.
    """
    wide = min(axis.count for axis in axes)
    multiple = options.multiple_of or (gcd(wide, GROUPED) if options.experts else 1)
    if options.width is not None:
        if options.width > wide:
            raise UsageError(
                f"`width={options.width}`: an FFN has {wide} hidden units.",
                "To widen: prunecli share-ffn --width.",
            )
        if options.width % multiple:
            raise UsageError(
                f"`width={options.width}` is no multiple of {multiple}: transformers may refuse to run such experts.",
                "Give another, or `multiple_of=1` for what runs any.",
            )
        return Budget(keep={axis.name: options.width for axis in axes})
    least = max(options.least, 1)
    budget = Budget(
        options.share,
        options.count,
        scope="axis" if options.uniform else "model",
        least=least,
        multiple=multiple,
    )
    if options.count is None or not options.uniform:
        return budget
    budget.removable(axes)
    each, over = divmod(options.count, len(axes))
    if over or any(axis.count - each < least for axis in axes):
        raise UsageError(
            f"`count={options.count}`: the {len(axes)} FFNs cannot all lose as many hidden units.",
            f"Give a multiple of {len(axes)} that each can lose, or rank all units together: `uniform=False`.",
        )
    return replace(budget, count=each)  # of each
