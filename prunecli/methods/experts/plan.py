"""From a checkpoint, statistics and options to a plan: which experts stay. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prunecli.errors import PruneError, UsageError
from prunecli.methods.experts.aimer import aimer_values
from prunecli.methods.experts.budget import (
    Request,
    balance_text,
    keep_count,
    layers_of,
    request_of,
    select_experts,
    starved,
)
from prunecli.methods.experts.memory_fit import MemoryFit, smallest_ratio
from prunecli.methods.experts.metrics import (
    AIMER,
    MOST_ALONE,
    RANDOM,
    WITHOUT_STATISTICS,
    Measured,
    measure_languages,
    measure_texts,
    random_values,
    read_all,
    scarcity_warning,
)
from prunecli.methods.experts.options import (
    Amount,
    ExpertOptions,
    check_kind,
    default_ratio,
    of_language_model,
)
from prunecli.methods.experts.selection import read_experts
from prunecli.model.axes import Axis
from prunecli.model.decision import Decision, Origin
from prunecli.model.find_axes import axes_of
from prunecli.model.history import given, history_step
from prunecli.model.mixtures import predicting_tensors
from prunecli.model.sparse_layer import SparseLayer
from prunecli.model.structure import STATISTICS_OF
from prunecli.progress import Progress, silent
from prunecli.results.gates import GateStatistics
from prunecli.results.matching import match_gates, other_form
from prunecli.selection.select import Kept, best, places_of
from prunecli.selection.selection import Selection
from prunecli.text.plain import MIXED

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

COMMAND = "prune-experts"


@dataclass(frozen=True)
class ExpertPlan(Selection):
    """Which experts stay, and why. None stay of a layer that predicts further tokens and is dropped.

    Attributes:
        thresholds: theta of eq. 5 under `"model"`, or of each side; empty for per-layer.
        fit: the arithmetic, where a memory was given.
        warning: what to say before anything is written.
        few: layer's name -> experts that saw fewer tokens than `ExpertOptions.min_tokens`.
    """

    thresholds: Mapping[str, float] = field(default_factory=dict)
    fit: MemoryFit | None = None
    warning: str | None = None
    few: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def plan_experts(checkpoint: Checkpoint, options: ExpertOptions, progress: Progress = silent) -> ExpertPlan:
    """Choose the experts to keep; weights are read for the metric `aimer` alone.

    Raises:
        CheckpointError: weights that hold what is no number.
        UnsupportedModelError: the family is not declared, or has no experts.
        StatisticsError: damaged files, of another model, or without these languages.
        UsageError: options that contradict each other or leave too few experts.
    """
    checkpoint.refuse_constants()
    check_kind(options, of_language_model(checkpoint))
    layers = layers_of(checkpoint, options)
    chosen_in = {layer.name for layer in layers}
    every = axes_of(checkpoint, "expert")
    axes = [axis for axis in every if axis.module in chosen_in]
    if options.keep is None:
        plan = _by_metric(checkpoint, options, layers, axes, progress)
    else:
        plan = _from_ids(checkpoint, Path(options.keep), options, axes)
    kept = {**plan.kept, **{axis.name: () for axis in every if axis.module not in chosen_in}}
    sizes, mixture = checkpoint.resolved.sizes, checkpoint.resolved.family.mixture
    assert mixture is not None
    settings: dict[str, int] = {}
    if options.mtp == "drop":
        settings = {key: 0 for key in mixture.predicted if sizes.states(key)}
        plan = replace(plan, dropped=predicting_tensors(checkpoint, sizes))
    if options.active is not None and not isinstance(mixture.top_k, int):
        keys = [key for key in mixture.top_k if sizes.states(key)] or mixture.top_k[:1]
        settings |= dict.fromkeys(keys, options.active)
    return replace(plan, kept=kept, settings=settings)


def _by_metric(
    checkpoint: Checkpoint,
    options: ExpertOptions,
    layers: Sequence[SparseLayer],
    axes: Sequence[Axis],
    progress: Progress,
) -> ExpertPlan:
    request, fit = _request(checkpoint, options, layers)
    measured = _measured(checkpoint, options, layers, axes, progress).held(axes)
    is_threshold, is_random = request.strategy != "per-layer", measured.metric == RANDOM
    if of_language_model(checkpoint) and is_threshold and any(layer.is_predicting for layer in layers):
        raise UsageError(
            f"--strategy {options.strategy}: layers that predict further tokens have no statistics to share a "
            "threshold with the others.",
            "Drop them with --mtp drop, or use --strategy per-layer.",
        )
    request = replace(request, released=measured.mode == "published")
    kept, thresholds = select_experts(axes, measured.values, request)
    balance = None
    if len({axis.side for axis in axes}) > 1 and request.per_layer is None:
        balance = None if request.strategy == "global-threshold" else balance_text(request.balance)
    amount = options.amount
    ratio = amount.ratio if fit is None else fit.ratio
    if amount == Amount():
        ratio = default_ratio(checkpoint)
    arguments = {
        "ratio": ratio,
        "count": amount.count,
        "experts_per_layer": None if request.per_layer is None else dict(request.per_layer),
        "fit_bytes": amount.fit,
        "metric": measured.metric,
        "seed": options.seed if is_random else None,
        "strategy": options.strategy,
        "balance": balance,
        "min_per_layer": request.minimum,
        "round_to": options.multiple_of if options.multiple_of > 1 else None,
    }
    step = _step(checkpoint, options, axes, kept, arguments, measured)
    alone = {
        name: {
            axis.name: best(axis, own, len(kept[axis.name]), request.groups)
            for axis in axes
            # Without a token, a language or text has no experts of its own.
            if (own := values.get(axis.name)) is not None and 0 < own.sum() < np.inf
        }
        for name, values in measured.alone.items()
    }
    decision = Decision(
        "expert",
        places_of(axes, kept, measured.values, groups=request.groups, alone=alone),
        measured.metric,
        f"{request.strategy}: the highest of each {'group of a layer' if request.groups > 1 else 'layer'} stay",
        f"every layer keeps {request.minimum} at least" if is_threshold else "",
        thresholds={} if request.groups > 1 or request.released else thresholds,
        origin=Origin(texts=measured.texts, split=measured.split).read_from(step),
    )
    places = tuple(
        # The published ratios do not say how many tokens they were measured on.
        replace(
            place,
            metric=AIMER if place.module in measured.unseen else "",
            tokens=measured.tokens.get(place.module),
        )
        for place in decision.places
    )
    decision = replace(decision, places=places)
    if is_random:
        how = f"drawn at random (seed {options.seed})"
        decision = Decision("expert", places_of(axes, kept), how=how)
    held = sum(len(axis.ids) for axis in axes)
    warning = scarcity_warning(measured.few, kept, held, options.min_tokens)
    # Under a global threshold the statistics say how many experts each layer keeps.
    if warning is None and options.strategy != "global-threshold":
        warning = starved(axes, kept)
    reasons = _reasons(options, measured, balance, thresholds)
    if measured.of is not None:
        step[STATISTICS_OF] = measured.of
        reasons.append(
            f"The statistics are of another form of the model ({measured.of}): {checkpoint.path} is quantised, and its "
            "routers have the same values."
        )
    return ExpertPlan(
        kept,
        options.dtype,
        step,
        tuple(reasons),
        decision,
        thresholds=thresholds,
        fit=fit,
        warning=warning,
        few=measured.few,
    )


def _request(
    checkpoint: Checkpoint, options: ExpertOptions, layers: Sequence[SparseLayer]
) -> tuple[Request, MemoryFit | None]:
    """The request with the number of experts to keep; if a memory is given, with the arithmetic.

    Raises:
        UsageError: as `request_of`; several amounts, or an impossible one.
    """
    amount, held = options.amount, sum(len(layer.experts) for layer in layers)
    if sum(each is not None for each in vars(amount).values()) > 1:
        raise UsageError(
            "Give one of --ratio, --count, --fit, --experts-per-layer.", "Each says how many experts stay."
        )
    request = replace(request_of(checkpoint, options, layers), per_layer=amount.per_layer)
    if amount.fit is not None:
        fit = smallest_ratio(checkpoint, amount.fit, dtype=options.dtype, request=request, **options.load)
        return replace(request, keep=fit.keep), fit
    if amount.count is not None:
        return replace(request, keep=max(held - amount.count, 0)), None
    if amount.per_layer is not None:
        return request, None
    ratio = default_ratio(checkpoint) if amount.ratio is None else amount.ratio
    return replace(request, keep=keep_count(ratio, held)), None


def _from_ids(checkpoint: Checkpoint, path: Path, options: ExpertOptions, axes: Sequence[Axis]) -> ExpertPlan:
    chosen = {
        "--ratio, --count, --fit, --experts-per-layer": options.amount != Amount(),
        "--metric": options.metric,
        "--strategy": options.strategy != "per-layer",
        "--balance": options.balance,
        "--min": options.least,
        "--multiple-of": options.multiple_of > 1,
        "--granularity": options.granularity,
    }
    if odd := [name for name, is_given in chosen.items() if is_given]:
        raise UsageError(
            f"--keep names the experts to keep; it does not go with {' or '.join(odd)}.",
            "Leave one of them out, or select from statistics with --gates.",
        )
    kept = read_experts(path, axes, options.sources, options.targets)
    pairs = [pair for pair in product(options.sources, options.targets) if pair[0] != pair[1]]
    alone: dict[str, Kept] = {}
    for source, target in pairs if 1 < len(pairs) <= MOST_ALONE else ():
        with suppress(PruneError):  # the file may have no experts for a single pair
            alone[f"{source}-{target}"] = read_experts(path, axes, (source,), (target,))
    step = _step(checkpoint, options, axes, kept)
    decision = Decision(
        "expert",
        places_of(axes, kept, alone=alone),
        how=f"named in {path.name}",
        origin=Origin(texts=tuple(map("-".join, pairs))).read_from(step),
    )
    return ExpertPlan(kept, options.dtype, step, (f"Experts by {path}{_languages(options)}.",), decision)


def _step(
    checkpoint: Checkpoint,
    options: ExpertOptions,
    axes: Sequence[Axis],
    kept: Kept,
    arguments: Mapping[str, Any] | None = None,
    measured: Measured | None = None,
) -> dict[str, Any]:
    """The entry for the history.

    Args:
        arguments: how many experts were chosen, and how; None: a file names them.
        measured: what they were chosen by; None: a file names them.
    """
    # Without statistics, files that exist hold the means of constants; `mean_outputs` refuses those that are missing.
    files = [file for file in options.files if options.constant and file.is_file()]
    if measured is not None and measured.mode is not None:
        files = [*options.files]
    if options.keep is not None:
        files = [Path(options.keep), *files]
    arguments = {
        **(arguments or {}),
        "mtp": options.mtp if options.mtp == "drop" else None,
        "active": options.active,
        "constant_experts": options.constant or None,
        "granularity": None if measured is None else measured.granularity,
        "source": list(options.sources),
        "target": list(options.targets),
        "for": list(options.texts),
        "min_tokens": options.min_tokens if measured is not None and measured.mode == "text" else None,
        "dtype": options.dtype,
    }
    counts = {"before": sum(len(axis.ids) for axis in axes), "after": sum(map(len, kept.values()))}
    return history_step(COMMAND, checkpoint, given(arguments), files, experts=counts)


def _measured(
    checkpoint: Checkpoint,
    options: ExpertOptions,
    layers: Sequence[SparseLayer],
    axes: Sequence[Axis],
    progress: Progress,
) -> Measured:
    """The metric of every original expert, and where it comes from."""
    if options.metric == RANDOM:
        return Measured(random_values(axes, options.seed), RANDOM)
    if options.metric == AIMER:
        return Measured(aimer_values(checkpoint, layers, progress=progress), AIMER)
    gates = options.gates
    if isinstance(gates, GateStatistics):
        statistics = match_gates(gates, checkpoint)
    else:
        statistics = read_all(checkpoint, options.files, layers)
    if of_language_model(checkpoint):
        measured = measure_texts(statistics, options.metric, options.texts, axes, options.min_tokens)
        unseen = [layer for layer in layers if layer.is_predicting]  # no forward pass runs them
        values = {**measured.values, **aimer_values(checkpoint, unseen, progress=progress)}
        measured = replace(measured, values=values, unseen=frozenset(layer.name for layer in unseen))
    else:
        measured = measure_languages(
            statistics, options.metric, options.granularity, options.sources, options.targets
        )
    return replace(measured, of=other_form(statistics, checkpoint))


def _reasons(
    options: ExpertOptions, measured: Measured, balance: str | None, thresholds: Mapping[str, float]
) -> list[str]:
    said = "" if balance is None else f", balance {balance}{'' if options.balance else ' (default)'}"
    where = f", from {', '.join(map(str, options.files))}" if options.files else ""
    if measured.metric in WITHOUT_STATISTICS:
        how = (
            "Metric aimer, of the weights alone"
            if measured.metric == AIMER
            else f"Experts drawn at random (seed {options.seed})"
        )
        reason = f"{how}{said}; no statistics are read."
    elif measured.mode == "text":
        implied = "" if options.metric else " (default)"
        texts = f" for {', '.join(options.texts)}" if options.texts else ""
        unseen = (
            "; aimer for layers that predict further tokens, which no text enters" if measured.unseen else ""
        )
        reason = f"Metric {measured.metric}{implied}{texts}{where}{unseen}."
    else:
        implied = "" if options.granularity else " (default)"
        reason = (
            f"Metric {measured.metric}{said}, granularity {measured.granularity}{implied}"
            f"{_languages(options)}{where}."
        )
    reasons = [reason]
    if thresholds:
        thetas = ", ".join(f"{theta:.4f} ({side})" for side, theta in thresholds.items())
        counted = ", counted as in the authors' released code" if measured.mode == "published" else ""
        reasons.append(f"Threshold theta: {thetas}{counted}.")
    return [*reasons, MIXED] if measured.mixed else reasons


def _languages(options: ExpertOptions) -> str:
    if not options.sources and not options.targets:
        return ""
    source, target = (", ".join(names) or "any" for names in (options.sources, options.targets))
    return f": {source} to {target}"
