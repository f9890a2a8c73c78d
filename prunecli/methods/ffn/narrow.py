"""Width pruning: which hidden units of each FFN stay. From a checkpoint, options and activations to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from prunecli.architectures.records import Side
from prunecli.choices import Choices
from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.methods.ffn.names import UnitMetric
from prunecli.methods.ffn.score import UnitActivations, unit_norms
from prunecli.methods.sharing.arrange import Group
from prunecli.model.decision import Decision, Origin
from prunecli.model.ffn import FfnLayer
from prunecli.model.find_axes import axes_of
from prunecli.model.history import given, history_step
from prunecli.selection.select import Budget, places_of, select
from prunecli.selection.selection import Selection
from prunecli.tensors.quantities import exact_share

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

Activations = Callable[[], UnitActivations]
"""Measures the hidden units of each FFN that holds tensors."""


@dataclass(frozen=True)
class NarrowOptions(Choices):
    """What `prune-ffn` is asked.

    Attributes:
        ratio: fraction of the hidden units that go; with neither it nor `width`: DEFAULT_RATIO.
        width: hidden units that every FFN keeps, instead.
        side: the only side whose FFNs get narrower; None: both.
        uniform: whether each FFN loses the same fraction of its units; if False, the units of all FFNs are ranked
            together, so that widths differ.
        metric: what a unit is worth.
        multiple_of: widths become multiples of it.
        dense_only: whether mixtures of experts are left as they are; else they are refused.
        dtype: type of the result; None: as stored.
        seed: of the metric `random`.
        text: what activations are measured on, for the history.
    """

    ratio: float | None = None
    width: int | None = None
    side: Side | None = None
    uniform: bool = True
    metric: UnitMetric = "activation-norm"
    multiple_of: int = 1
    dense_only: bool = False
    dtype: str | None = None
    seed: int = 0
    text: Mapping[str, object] | None = None


def plan_widths(
    checkpoint: Checkpoint, options: NarrowOptions, activations: Activations | None = None
) -> Selection:
    """Choose the hidden units to keep. An FFN that several layers run counts once.

    Args:
        checkpoint: the source; its weights are read where units are scored by their norms.
        options: see there.
        activations: called where units are scored by their activations.

    Raises:
        UnsupportedModelError: the family is not declared, a side has mixtures of experts, or an FFN is quantised.
        UsageError: options that contradict each other, or that leave an FFN without units.
        CheckpointError: the weights are damaged.
    """
    layers = checkpoint.layout.ffns
    by_name = {layer.name: layer for layer in layers}
    chosen = _chosen(layers, options)
    own = {
        layer.name: Group((layer.name,), (layer.name,), None, layer.width, layer.width)
        for layer in layers
        if layer.name in chosen
    }
    refuse_contradictions(options)
    _refuse_quantised(checkpoint, map(by_name.__getitem__, own))
    scores, tokens = _scores(checkpoint, by_name, own, options, activations)
    axes = [axis for axis in axes_of(checkpoint, "unit") if axis.module in own]
    values = {axis.name: scores[axis.module] for axis in axes}
    relative = {name: of_units / (np.linalg.norm(of_units) or 1) for name, of_units in values.items()}
    how, rule = "of each FFN", "the same part of each FFN stays, the highest of it"
    if not options.uniform:
        how = "of all FFNs together"
        rule = "the highest of each FFN stay, as many as there are of it among the best of all FFNs"
    ratio = DEFAULT_RATIO if options.ratio is None and options.width is None else options.ratio
    budget = Budget(ratio, together=not options.uniform, least=1, multiple=options.multiple_of)
    if options.width is not None:
        wide = min(len(axis.ids) for axis in axes)
        if options.width > wide:
            raise UsageError(
                f"--width {options.width}: an FFN has {wide} hidden units.",
                "To widen: prunecli share-ffn --width.",
            )
        budget = Budget(keep=dict.fromkeys(values, options.width))
    kept = select(axes, values if options.uniform else relative, budget)
    reasons = [f"Hidden units {how} by {options.metric}, the lowest go."]
    if options.ratio is None and options.width is None:
        reasons.insert(0, f"No --ratio given: removing {DEFAULT_RATIO:.0%} of the hidden units.")
    is_random = options.metric == "random"
    decision = Decision(
        "unit",
        tuple(
            replace(place, tokens=tokens.get(place.module))
            for place in places_of(axes, kept, None if is_random else values)
        ),
        None if is_random else options.metric,
        f"drawn at random (seed {options.seed})" if is_random else rule,
        origin=Origin.of_text(options.text),
    )
    arguments = {
        "ratio": ratio,
        "width": options.width,
        "side": options.side,
        "per_layer": not options.uniform or None,
        "score": options.metric,
        "round_to": None if options.multiple_of == 1 else options.multiple_of,
        "text": None if options.text is None else dict(options.text),
        "dense_only": options.dense_only or None,
        "seed": options.seed if is_random else None,
        "dtype": options.dtype,
    }
    step = history_step(COMMAND, checkpoint, given(arguments))
    return Selection(kept, options.dtype, step, tuple(reasons), decision)


def refuse_contradictions(options: NarrowOptions) -> None:
    """Refuse options that do not go together.

    Raises:
        UsageError: they do not, or say what cannot be.
    """
    if options.ratio is not None and options.width is not None:
        raise UsageError("Give one of --ratio and --width.", "Each says how many hidden units go.")
    if options.ratio is not None:
        exact_share(options.ratio, "hidden units", DEFAULT_RATIO)
    if options.width is not None and (options.width < 1 or not options.uniform):
        what = "an FFN of no width is none." if options.uniform else "--uneven: widths differ then."
        raise UsageError(
            f"--width {options.width}: {what}", "Give --ratio, or to remove FFNs: prunecli share-ffn."
        )
    if not options.uniform and options.metric == "random":
        raise UsageError("--uneven: random scores say nothing of layers.", "Leave --uneven out.")


def _chosen(layers: Sequence[FfnLayer], options: NarrowOptions) -> set[str]:
    """Names of the FFNs that get narrower."""
    sides = [layer.side for layer in layers]
    if options.side is not None and options.side not in sides:
        raise UsageError(f"--side {options.side}: the model has no {options.side}.", "Leave it out.")
    own = [layer for layer in layers if options.side in (None, layer.side) and not layer.removed]
    dense = [layer for layer in own if not layer.is_sparse]
    if not dense or (len(dense) < len(own) and not options.dense_only):
        remedy = f"Add --dense-only to narrow the other {len(dense)} and leave these."
        raise UnsupportedModelError(
            f"{len(own) - len(dense)} of the {len(own)} FFNs are mixtures of experts."
            if own
            else "The model has no FFN left.",
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


def _refuse_quantised(checkpoint: Checkpoint, layers: Iterable[FfnLayer]) -> None:
    """Before any text is run; norms of what is stored would not be those of the weights."""
    names = (f"{layer.name}.{suffix}" for layer in layers for suffix in layer.tensors)
    if quantised := next((name for name in names if name in checkpoint.quantised), None):
        raise checkpoint.quantised_refusal(quantised)


def _scores(
    checkpoint: Checkpoint,
    layers: Mapping[str, FfnLayer],
    groups: Mapping[str, Group],
    options: NarrowOptions,
    activations: Activations | None,
) -> tuple[dict[str, np.ndarray], Mapping[str, int]]:
    """Owner -> `[width]`: what each hidden unit is worth; owner -> tokens that it was measured on."""
    if options.metric == "random":
        generator = np.random.default_rng(options.seed)
        return {owner: generator.random(group.width) for owner, group in groups.items()}, {}
    checkpoint.check()  # weights of other shapes than config.json says would be added up
    if options.metric == "norms":
        return {owner: unit_norms(checkpoint, layers, group) for owner, group in groups.items()}, {}
    if activations is None:
        raise UsageError(f"--metric {options.metric} needs text.", "Give --data or --text.")
    measured = activations()
    found = {owner: np.asarray(measured.magnitudes[owner], np.float64) for owner in groups}
    if options.metric == "activation":
        return found, measured.tokens
    norms = {
        owner: unit_norms(checkpoint, layers, group, output_only=True) for owner, group in groups.items()
    }
    return {owner: values * norms[owner] for owner, values in found.items()}, measured.tokens
