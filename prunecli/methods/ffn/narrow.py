"""Width pruning: which hidden units of each FFN stay. From a checkpoint, options and scores to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from prunecli.architectures.records import Side
from prunecli.choices import Choices
from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.methods.ffn.names import UnitMetric
from prunecli.methods.ffn.score import unit_norms
from prunecli.methods.sharing.arrange import Group
from prunecli.model.axes import Axis
from prunecli.model.decision import Decision, Origin
from prunecli.model.ffn import FfnLayer
from prunecli.model.find_axes import axes_of
from prunecli.model.history import given, history_step
from prunecli.results.matching import scores_for
from prunecli.results.unit_scores import Array, Scores, files_of, from_files
from prunecli.selection.given import selection_of_file
from prunecli.selection.select import Budget, places_of, select
from prunecli.selection.selection import Selection
from prunecli.tensors.quantities import exact_share
from prunecli.text.plain import MIXED

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

COMMAND = "prune-ffn"
DEFAULT_RATIO = 0.25

MEASURED: tuple[UnitMetric, ...] = ("activation", "activation-norm")
"""Those that look at text."""

NORMS_WARNING = (
    "Warning: norms looks at no text. On SmolLM2-135M it raised the perplexity of WikiText-2 from 18.5 to 1,676,926 "
    "at --ratio 0.25; activation-norm with --text raised it to 31.3."
)

Measure = Callable[[], Scores]
"""Runs the model on text."""


@dataclass(frozen=True)
class NarrowOptions(Choices):
    """What `prune-ffn` is asked.

    Attributes:
        ratio: fraction of the hidden units that go; with neither it nor another amount: DEFAULT_RATIO.
        count: hidden units that go, of all FFNs.
        width: hidden units that every FFN keeps, instead.
        keep: a saved selection, instead of a metric and an amount.
        least: hidden units that each FFN keeps at least.
        side: the only side whose FFNs get narrower; None: both.
        uniform: whether each FFN loses the same part of its units; if False, the units of all FFNs are ranked
            together, so that widths differ.
        metric: what a unit is worth; None: as in `scores`, else `activation-norm`.
        scores: activations that were measured before, or one file of them or several, merged; None: text is read.
        multiple_of: widths become multiples of it.
        dense_only: whether mixtures of experts are left as they are; else they are refused.
        dtype: type of the result; None: as stored.
        seed: of the metric `random`.
        text: what activations are measured on, for the history.
    """

    ratio: float | None = None
    count: int | None = None
    width: int | None = None
    keep: Path | str | None = None
    least: int = 1
    side: Side | None = None
    uniform: bool = True
    metric: UnitMetric | None = None
    scores: Scores | Path | str | Sequence[Path | str] | None = None
    multiple_of: int = 1
    dense_only: bool = False
    dtype: str | None = None
    seed: int = 0
    text: Mapping[str, object] | None = None

    @property
    def needs_text(self) -> bool:
        """Whether the model has to run on text."""
        named = self.keep is not None or self.scores is not None
        return not named and self.metric in (None, *MEASURED)


def plan_widths(checkpoint: Checkpoint, options: NarrowOptions, measure: Measure | None = None) -> Selection:
    """Choose the hidden units to keep. An FFN that several layers run counts once.

    Args:
        checkpoint: the source; its weights are read where units are scored by norms.
        options: see there.
        measure: called where units are scored by their activations, and no scores are given.

    Raises:
        UnsupportedModelError: the family is not declared, a side has mixtures of experts, or an FFN is quantised.
        UsageError: options that contradict each other, or that leave an FFN without units.
        CheckpointError: the weights are damaged.
        StatisticsError: files of scores that are damaged or of another model.
    """
    refuse_contradictions(options)
    layers = checkpoint.layout.ffns
    chosen = _chosen(layers, options)
    axes = [axis for axis in axes_of(checkpoint, "unit") if axis.module in chosen]
    if quantised := next(
        (name for axis in axes for name in axis.carriers if name in checkpoint.quantised), None
    ):
        raise checkpoint.quantised_refusal(
            quantised
        )  # norms of what is stored would not be those of the weights
    if options.keep is not None:
        return selection_of_file(COMMAND, checkpoint, axes, Path(options.keep), options.dtype)
    no_amount = options.ratio is None and options.count is None and options.width is None
    ratio = DEFAULT_RATIO if no_amount else options.ratio
    budget = _budget(axes, options, ratio)
    values, scores = _values(checkpoint, axes, options, measure)
    metric = options.metric or (scores.method if scores else "activation-norm")
    relative = {name: of_units / (np.linalg.norm(of_units) or 1) for name, of_units in values.items()}
    kept = select(axes, values if options.uniform else relative, budget)
    how, rule = "of each FFN", "the same part of each FFN stays, the highest of it"
    if not options.uniform:
        how = "of all FFNs together"
        rule = "the highest of each FFN stay, as many as there are of it among the best of all FFNs"
    reasons = [f"Hidden units {how} by {metric}{from_files(options.scores)}, the lowest go."]
    if scores and scores.mixed:
        reasons.append(MIXED)
    if no_amount:
        reasons.insert(0, f"No --ratio given: removing {DEFAULT_RATIO:.0%} of the hidden units.")
    is_random = metric == "random"
    arguments = {
        "ratio": ratio,
        "count": options.count,
        "width": options.width,
        "min": None if options.least == 1 else options.least,
        "side": options.side,
        "per_layer": not options.uniform or None,
        "score": metric,
        "round_to": None if options.multiple_of == 1 else options.multiple_of,
        "text": None if options.text is None else dict(options.text),
        "dense_only": options.dense_only or None,
        "seed": options.seed if is_random else None,
        "dtype": options.dtype,
    }
    step = history_step(COMMAND, checkpoint, given(arguments), files_of(options.scores))
    origin = Origin.of_text(options.text)
    decision = Decision(
        "unit",
        places_of(axes, kept, None if is_random else values, tokens=scores.tokens if scores else None),
        None if is_random else metric,
        f"drawn at random (seed {options.seed})" if is_random else rule,
        origin=scores.origin.read_from(step) if scores and options.scores is not None else origin,
    )
    return Selection(kept, options.dtype, step, tuple(reasons), decision)


def refuse_contradictions(options: NarrowOptions) -> None:
    """Refuse options that do not go together.

    Raises:
        UsageError: they do not, or say what cannot be.
    """
    amounts = {"--ratio": options.ratio, "--count": options.count, "--width": options.width}
    chosen = [name for name, amount in amounts.items() if amount is not None]
    ranked = chosen or options.metric or options.scores is not None or not options.uniform
    if options.keep is not None and (ranked or options.least > 1 or options.multiple_of > 1):
        raise UsageError(
            "--keep names what stays; it goes with none of --ratio, --count, --width, --min, --multiple-of, "
            "--uneven, --metric, --scores.",
            "Leave them out.",
        )
    if len(chosen) > 1:
        raise UsageError(f"Give one of {' and '.join(chosen)}.", "Each says how many hidden units go.")
    if options.ratio is not None:
        exact_share(options.ratio, "hidden units", DEFAULT_RATIO)
    if options.width is not None and (options.width < 1 or not options.uniform):
        what = "an FFN of no width is none." if options.uniform else "--uneven: widths differ then."
        raise UsageError(
            f"--width {options.width}: {what}", "Give --ratio, or to remove FFNs: prunecli share-ffn."
        )
    if not options.uniform and options.metric == "random":
        raise UsageError("--uneven: random scores say nothing of layers.", "Leave --uneven out.")
    if options.scores is not None and options.metric not in (None, *MEASURED):
        raise UsageError(
            f"--scores: --metric {options.metric} does not look at activations.",
            f"Leave --scores out, or choose {' or '.join(MEASURED)}.",
        )


def _chosen(layers: Sequence[FfnLayer], options: NarrowOptions) -> set[str]:
    """Names of the FFNs that get narrower."""
    sides = [layer.side for layer in layers]
    if options.side is not None and options.side not in sides:
        raise UsageError(f"--side {options.side}: the model has no {options.side}.", "Leave it out.")
    own = [
        layer for layer in layers if options.side in (None, layer.side) and (layer.is_sparse or layer.tensors)
    ]
    dense = [layer for layer in own if not layer.is_sparse]
    if not dense or (len(dense) < len(own) and not options.dense_only):
        remedy = f"Add --dense-only to narrow the other {len(dense)} and leave these."
        raise UnsupportedModelError(
            f"{len(own) - len(dense)} of the {len(own)} FFNs are mixtures of experts."
            if own
            else "The model has no FFN that could get narrower.",
            remedy if dense else "Only a dense FFN can get narrower; see prunecli prune-experts.",
        )
    outside = next(
        (
            one
            for one in layers
            if options.side not in (None, one.side) and one.owner in {layer.owner for layer in dense}
        ),
        None,
    )
    if outside is not None:
        raise UsageError(
            f"--side {options.side}: {outside.name} runs an FFN of that side too.", "Leave --side out."
        )
    return {layer.owner for layer in dense}


def _budget(axes: Sequence[Axis], options: NarrowOptions, ratio: float | None) -> Budget:
    """How many hidden units go.

    Raises:
        UsageError: an FFN has fewer than stay, or they cannot go evenly.
    """
    if options.width is not None:
        wide = min(len(axis.ids) for axis in axes)
        if options.width > wide:
            raise UsageError(
                f"--width {options.width}: an FFN has {wide} hidden units.",
                "To widen: prunecli share-ffn --width.",
            )
        return Budget(keep={axis.name: options.width for axis in axes})
    least = max(options.least, 1)
    budget = Budget(
        ratio, options.count, together=not options.uniform, least=least, multiple=options.multiple_of
    )
    if options.count is None or not options.uniform:
        return budget
    budget.removable(axes)
    each, over = divmod(options.count, len(axes))
    if over or any(len(axis.ids) - each < least for axis in axes):
        raise UsageError(
            f"--count {options.count}: the {len(axes)} FFNs cannot all lose as many hidden units.",
            f"Give a multiple of {len(axes)} that each can lose, or rank all units together: --uneven.",
        )
    return replace(budget, count=each)  # of each


def _values(
    checkpoint: Checkpoint, axes: Sequence[Axis], options: NarrowOptions, measure: Measure | None
) -> tuple[Mapping[str, Array], Scores | None]:
    """Name of an axis -> `[width]`: what each hidden unit is worth; the activations on text that it follows from."""
    if options.metric == "random":
        generator = np.random.default_rng(options.seed)
        return {axis.name: generator.random(len(axis.ids)) for axis in axes}, None
    checkpoint.check()  # weights of other shapes than config.json says would be added up
    layers = {layer.name: layer for layer in checkpoint.layout.ffns}

    def norms(axis: Axis, *, output_only: bool) -> Array:
        width = len(axis.ids)
        group = Group((axis.module,), (axis.module,), None, width, width)
        return unit_norms(checkpoint, layers, group, output_only=output_only)

    if options.metric == "norms":
        return {axis.name: norms(axis, output_only=False) for axis in axes}, None
    if options.scores is not None:
        scores = scores_for(checkpoint, options.scores, "unit", axes)
    elif measure is not None:
        scores = measure()
    else:
        metric = options.metric or "activation-norm"
        raise UsageError(f"--metric {metric} needs text.", "Give --data or --text.")
    values = scores.picked(axes)
    if (options.metric or scores.method) == "activation":
        return values, scores
    return {axis.name: values[axis.name] * norms(axis, output_only=True) for axis in axes}, scores
