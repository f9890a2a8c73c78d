"""Choose the heads (1905.10650, 4), hidden units and layers to keep: by scores, at random, by place, or by number."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import fsum, gcd, sqrt
from pathlib import Path

import numpy as np

from prunecli.errors import StatisticsError, UnsupportedModelError, UsageError
from prunecli.methods.options import HeadOptions, LayerOptions, NarrowOptions
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
from prunecli.model.parts import KINDS
from prunecli.model.probe import outputs
from prunecli.model.stock import uniform_heads
from prunecli.results.matching import scores_for
from prunecli.results.unit_scores import Array, Scores
from prunecli.selection.cut import Selection, decision_of, read_kept, selection_of
from prunecli.selection.select import Budget
from prunecli.text.choice import Dataset, TaskName, training_task_of

DEFAULT_NORMALIZE = {"gradient": "per-layer", "ablation": "none"}
"""The paper normalises I_h (4.1), and says nothing of the kind of differences of scores (4.2)."""


def plan_heads(checkpoint: Checkpoint, options: HeadOptions) -> Selection:
    """Choose the heads to keep.

    Raises:
        UnsupportedModelError: its class says nothing.
        StatisticsError: damaged files, of another model, or that rank no heads.
        UsageError: options that contradict each other, or that remove more heads than there are.
    """
    axes = axes_of(checkpoint, "head")
    if options.keep is not None:
        return kept_by_file(checkpoint, options, axes)
    is_all = options.attention == KINDS
    present = [*dict.fromkeys(axis.attention for axis in axes)]
    for kind in () if is_all else options.attention:
        if kind not in present:
            raise UsageError(
                f"`attention={kind}`: the model has no such attention.", f"It has {', '.join(present)}."
            )
    even = uniform_heads(checkpoint) if options.uniform else None
    if even == ():
        family = checkpoint.require_architecture()
        why = family.stock_fault or f"a config of type {family.model_type} cannot say how many heads are left"
        raise UsageError(
            f"`uniform`: {checkpoint.path} cannot lose heads and be a stock model: {why}.",
            "Leave `uniform` out: the result then opens only where prunecli is installed.",
        )
    normalize, method = None, None
    if options.metric == "random":
        ranking = drawn(axes, options.seed)
    else:
        scores = scores_for(checkpoint, options.scores, axes)
        try:
            worth = scores.importance()
        except StatisticsError as error:
            files = "".join(f"{path}: " for path in options.score_files[:1])
            raise StatisticsError(f"{files}{error.message}", error.remedy) from error
        normalize = options.normalize or DEFAULT_NORMALIZE[scores.method]
        method, by, normalised = scores.method, "", "not normalised"
        if normalize == "per-layer":
            worth, by, normalised = (
                normalized(worth),
                ", over the l2 norm of its attention",
                "normalised per-layer",
            )
        default = "" if options.normalize else " (default)"
        ranking = replace(
            by_scores(scores, scores.picked(axes, worth), options, method, f"importance by {method}{by}"),
            note=f" over {scores.examples:,} examples, {normalised}{default}",
        )
    return plan(
        checkpoint,
        options,
        axes,
        Budget(options.share, options.count, scope="model", least=options.least, even=even),
        ranking,
        {
            "ratio": options.share,
            "removed": None,
            "metric": options.metric,
            "method": method,
            "normalize": normalize,
        },
        chosen=[axis for axis in axes if axis.attention in options.attention],
        of=" of all attentions" if is_all else f" of {', '.join(options.attention)} attention",
    )


def normalized(importance: Mapping[str, Array]) -> dict[str, Array]:
    """I_h / sqrt(sum_h' I_h'^2) within each layer (4.1), over all heads that were scored; zeros stay zeros.

    Heads that a checkpoint no longer holds count in the norm, so that pruning in steps by the scores of the original
    removes the same heads as pruning at once.
    """
    found = {}
    for name, values in importance.items():
        # Relative to the largest first: squares of small gradients would vanish, and equal layers stay equal.
        relative = values / (np.abs(values).max(initial=0.0) or 1.0)
        found[name] = relative / (sqrt(fsum(np.square(relative))) or 1.0)
    return found


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
        UnsupportedModelError: its class says nothing, a side has mixtures of experts, or an FFN is quantised.
        UsageError: options that contradict each other, or that leave an FFN without units.
        CheckpointError: the weights are damaged.
        StatisticsError: files of scores that are damaged or of another model.
        PruneError: text or a model that cannot be used.
    """
    options.check_options()
    axes = _narrowed(checkpoint, options)
    for name in (name for axis in axes for name in axis.carriers if name in checkpoint.quantised):
        # Norms of stored values would not be those of the weights.
        raise checkpoint.quantised_refusal(name)
    if options.keep is not None:
        return kept_by_file(checkpoint, options, axes)
    budget = _width_budget(axes, options)
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
            # Imports torch.
            from prunecli.methods.measuring import measure_activations, measure_gradients

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
    owner = "expert" if options.experts else "FFN"
    return plan(
        checkpoint,
        options,
        axes,
        budget,
        ranking,
        {"ratio": options.share, "metric": metric, "text": text},
        of=f" of each {owner}" if options.uniform else " of all FFNs together",
        by_share=not options.uniform,
    )


def _narrowed(checkpoint: Checkpoint, options: NarrowOptions) -> list[Axis]:
    """The hidden units of the FFNs, or experts, that get narrower."""
    axes, layers = axes_of(checkpoint, "unit"), checkpoint.layout.ffns
    if options.experts:
        own = [axis for axis in axes if axis.keys]
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


def _width_budget(axes: Sequence[Axis], options: NarrowOptions) -> Budget:
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


LAST_WARNING = (
    "Warning: last looks at no text. On SmolLM2-135M it raised the perplexity of WikiText-2 from 15.4 to 4,167 at "
    "`ratio=0.1`; cosine with `files` raised it to 22.6."
)


def plan_layers(checkpoint: Checkpoint, options: LayerOptions, run: TextRun | None = None) -> Selection:
    """Choose the layers to keep.

    Args:
        checkpoint: the source; its weights are not read.
        run: text to run the model on, if the metric needs text and no scores are given.

    Raises:
        UnsupportedModelError: its class says nothing, or its layers cannot change their numbers.
        UsageError: options that contradict each other, or that leave a stack without layers.
        StatisticsError: files of scores that are damaged, of another model or metric.
        PruneError: text or a model that cannot be used.
    """
    axes = axes_of(checkpoint, "layer")
    if options.is_named:
        keeps = options.remove is None
        flag, text = ("keep", str(options.keep)) if keeps else ("remove", str(options.remove))
        if keeps and not text[:1].isdigit() and Path(text).is_file():
            kept = read_kept(Path(text), axes)
        else:
            named = parse_layers(flag, text, {axis.side: axis.count for axis in axes})
            kept = {
                axis.name: tuple(
                    number
                    for place, number in enumerate(axis.ids)
                    if axis.side not in named or (place in named[axis.side]) == keeps
                )
                for axis in axes
            }
        made = selection_of(
            options,
            checkpoint,
            axes,
            decision_of(axes, kept, how=f"named by --{flag}"),
            options.recorded(),
        )
    else:
        made = _by_values(checkpoint, options, axes, run)
    removed = {
        axis.side: gone
        for axis in axes
        if (gone := [place for place, number in enumerate(axis.ids) if number not in made.kept[axis.name]])
    }
    arguments = {**({"removed": removed} if removed else {}), **made.step["arguments"]}
    return replace(made, step={**made.step, "arguments": arguments})


def _by_values(
    checkpoint: Checkpoint, options: LayerOptions, axes: Sequence[Axis], run: TextRun | None
) -> Selection:
    """The layers with the highest values stay.

    Raises:
        StatisticsError: a file of another model or metric.
        UsageError: no text.
    """
    sides, counts = {axis.side: axis for axis in axes}, options.by_side
    for side in (*counts, *filter(None, [options.side])):
        if side not in sides:
            raise UsageError(f"The model has no {side}.", f"It has {', '.join(sides)} layers only.")
    chosen = [axis for axis in axes if axis.side in (counts or (options.side or axis.side,))]
    if options.contiguous and len(chosen) > 1 and not counts:
        raise UsageError(
            "`contiguous`: the number of layers of each stack is not given.",
            "Give `encoder` and `decoder`, or `side`.",
        )
    budget = Budget(options.share, options.count, scope="model", least=1)
    if counts:
        for axis in chosen:
            replace(budget, ratio=None, count=counts[axis.side]).removable([axis])
        budget = Budget(keep={axis.name: axis.count - counts[axis.side] for axis in chosen})
    metric = options.metric or "cosine"
    is_default = options.needs_text and not (options.metric or options.contiguous)
    if is_default and training_task_of(checkpoint) == "feature-extraction":
        # Without half of its layers by cosine, MiniLM's Spearman on STS-B falls to 0.844; at random to 0.894.
        metric = "embedding"
    text = None
    if metric == "random":
        ranking = drawn(axes, options.seed)
    elif metric == "last":
        # The last go first, the same share of each stack.
        values = {axis.name: np.arange(axis.count, 0, -1) / axis.count for axis in axes}
        ranking = Ranking(values, metric, how="by their place, the last first")
    else:
        from prunecli.methods.layers.score import measure_layers

        measure = partial(measure_layers, checkpoint, metric=metric)
        task: TaskName | None = "embedding" if metric == "embedding" else None
        scores, text = measured(
            checkpoint, options, metric, run, measure, axes=axes, task=task, without="last"
        )
        values = scores.picked(axes)
        for axis in chosen if options.contiguous else ():
            count = counts.get(axis.side) or budget.removable(chosen)
            if axis.name not in scores.distances:
                raise StatisticsError(
                    "`contiguous`: the scores hold no distances between layers.",
                    "Measure them again, on text.",
                )
            places = [*scores.places(axis), len(scores.ids[axis.name])]
            distances = np.array(scores.distances[axis.name]) / scores.counts[axis.name]
            values[axis.name] = best_runs(distances[np.ix_(places, places)], max(count, 1))
        shown = "angle of its best run" if options.contiguous else f"{scores.method} score"
        ranking = by_scores(scores, values, options, scores.method, shown, text)
    arguments = {"ratio": options.ratio, "metric": ranking.metric or metric, "text": text}
    return plan(checkpoint, options, axes, budget, ranking, arguments, chosen=chosen)


def best_runs(distances: Array, count: int) -> Array:
    """`[layers]`: for each layer, the least distance between the ends of a run of `count` layers that it lies in.

    The `count` layers with the least values are a run: the one with the nearest ends (2403.17887, 3.2).

    Args:
        distances: `[layers + 1, layers + 1]`, of the states before the layers and after the last.
        count: at most the number of layers.
    """
    runs = np.diagonal(distances, count)
    return np.array(
        [runs[max(0, number - count + 1) : number + 1].min() for number in range(len(distances) - 1)]
    )


def parse_layers(option: str, text: str, depths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """`3,7-9`, or `encoder:3,7,decoder:1`: numbers of layers by side, ascending.

    Args:
        option: what the text was given to, for messages.
        text: the numbers; a side holds until the next one is named, and a model with one stack needs none.
        depths: layers of each side of the model.

    Raises:
        UsageError: it is not of this form, or names what the model has not.
    """
    found: dict[str, set[int]] = {}
    side = next(iter(depths)) if len(depths) == 1 else None
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(encoder|decoder)\s*:\s*)?(\d+)(?:\s*-\s*(\d+))?\s*", part)
        side = (match and match[1]) or side
        first, last = (int(match[2]), int(match[3] or match[2])) if match else (1, 0)
        if side is None or not first <= last < depths.get(side, 0):
            ranges = " and ".join(f"{name}:0-{depth - 1}" for name, depth in depths.items())
            raise UsageError(
                f"`{option}={part.strip()}`: no layer of this model.",
                f"It has the layers {ranges}; write 3,7-9 or encoder:3,decoder:1.",
            )
        found.setdefault(side, set()).update(range(first, last + 1))
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}
