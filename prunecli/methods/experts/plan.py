"""Decide which experts to keep, from a checkpoint, statistics and options. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prunecli.errors import PruneError, StatisticsError, UsageError
from prunecli.methods.experts.budget import (
    MemoryFit,
    balance_text,
    held_in,
    select_experts,
    smallest_ratio,
    starved,
)
from prunecli.methods.experts.metrics import (
    AIMER,
    MOST_ALONE,
    RANDOM,
    Measured,
    aimer_values,
    default_metric,
    measure_languages,
    measure_texts,
    metric_values,
    random_values,
    read_all,
)
from prunecli.methods.experts.options import (
    Amount,
    ExpertOptions,
    check_kind,
    default_ratio,
    layers_of,
    of_language_model,
    request_of,
)
from prunecli.model.axes import Axis, axis_name
from prunecli.model.cost import usual_load
from prunecli.model.decision import Decision, Origin
from prunecli.model.find_axes import axes_of
from prunecli.model.history import given, history_step
from prunecli.model.mixtures import predicting_tensors
from prunecli.model.sparse_layer import SparseLayer
from prunecli.model.structure import STATISTICS_OF
from prunecli.progress import Progress, silent
from prunecli.results.gates import ANY, GateStatistics
from prunecli.results.matching import other_form
from prunecli.selection.given import read_kept
from prunecli.selection.select import Kept, Values, best, places_of
from prunecli.selection.selection import Selection
from prunecli.tensors.json_files import read_json
from prunecli.text.files import near_names
from prunecli.text.plain import MIXED

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

COMMAND = "prune-experts"
LAYERS_SHOWN = 6


@dataclass(frozen=True)
class ExpertPlan(Selection):
    """Which experts to keep, and why. A dropped multi-token-prediction layer keeps none.

    Attributes:
        thresholds: theta of eq. 5 under `"model"`, or of each side; empty for per-layer.
        fit: memory of the result, if `Amount.fit` was given.
        warning: warning to show before anything is written.
        few: layer's name -> experts that received fewer tokens than `ExpertOptions.min_tokens`.
    """

    thresholds: Mapping[str, float] = field(default_factory=dict)
    fit: MemoryFit | None = None
    warning: str | None = None
    few: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def plan_experts(checkpoint: Checkpoint, options: ExpertOptions, progress: Progress = silent) -> ExpertPlan:
    """Choose the experts to keep. Weights are read only for the metric `aimer`.

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
    """The experts with the highest values."""
    amount, request, fit = options.amount, request_of(checkpoint, options, layers), None
    if amount == Amount():
        amount = Amount(default_ratio(checkpoint))
    if amount.fit is not None:
        fit = smallest_ratio(
            checkpoint,
            amount.fit,
            usual_load(checkpoint, **options.load),
            request,
            dtype=options.dtype,
        )
        amount, request = replace(amount, ratio=fit.ratio), replace(request, keep=fit.keep)
    metric, measured, unseen = str(options.metric), None, list[SparseLayer]()
    if metric == RANDOM:
        values = random_values(axes, options.seed)
    elif metric == AIMER:
        values = aimer_values(checkpoint, layers, progress=progress)
    else:
        gates = options.gates if isinstance(options.gates, GateStatistics) else options.files
        statistics = read_all(checkpoint, gates, layers)
        metric = options.metric or default_metric(statistics)
        if of_language_model(checkpoint):
            measured = measure_texts(statistics, options.texts)
            unseen = [layer for layer in layers if layer.is_predicting]  # no forward pass runs them
        else:
            measured = measure_languages(statistics, options.granularity, options.sources, options.targets)
        values = metric_values(metric, measured.sums, statistics)
    if unseen:
        values |= aimer_values(checkpoint, unseen, progress=progress)
    held = _of_held(values, axes)
    is_threshold = options.strategy != "per-layer"
    if is_threshold and of_language_model(checkpoint) and any(layer.is_predicting for layer in layers):
        raise UsageError(
            f"--strategy {options.strategy}: layers that predict further tokens have no statistics to share a "
            "threshold with the others.",
            "Drop them with --mtp drop, or use --strategy per-layer.",
        )
    request = replace(request, released=measured is not None and measured.statistics.mode == "published")
    kept, thresholds = select_experts(axes, held, request)
    has_balance = options.strategy != "global-threshold" and not amount.per_layer
    balance = balance_text(request.balance) if has_balance and len({axis.side for axis in axes}) > 1 else None
    arguments = {
        "ratio": amount.ratio,
        "count": amount.count,
        "experts_per_layer": None if amount.per_layer is None else dict(amount.per_layer),
        "fit_bytes": amount.fit,
        "metric": metric,
        "seed": options.seed if metric == RANDOM else None,
        "strategy": options.strategy,
        "balance": balance,
        "min_per_layer": request.minimum,
        "round_to": options.multiple_of if options.multiple_of > 1 else None,
    }
    step = _step(checkpoint, options, axes, kept, arguments, measured)
    reasons = _reasons(options, metric, measured, unseen, balance, thresholds)
    origin, alone, tokens, few = Origin(), dict[str, Kept](), dict[str, int](), dict[str, tuple[int, ...]]()
    if measured is not None:
        many = (f"{len(measured.texts):,} pairs or texts",)
        texts = tuple(measured.texts) if len(measured.texts) <= MOST_ALONE else many
        origin = Origin(texts=texts, split=statistics.split)
        tokens = {axis_name(layer, "expert"): count for layer, count in measured.tokens.items()}
        few = measured.few(axes, options.min_tokens)
        for name, (sums, side) in measured.alone.items():
            own = _of_held(metric_values(metric, sums, statistics), axes)
            alone[name] = {
                axis.name: best(axis, own[axis.name], len(kept[axis.name]), request.groups)
                for axis in axes
                # Without a token, a language or text has no experts of its own.
                if axis.name in own and side in (None, axis.side) and 0 < own[axis.name].sum() < np.inf
            }
        if (other := other_form(statistics, checkpoint)) is not None:
            step[STATISTICS_OF] = other
            reasons.append(
                f"The statistics are of another form of the model ({other}): {checkpoint.path} is quantised, and its "
                "routers have the same values."
            )
    if metric == RANDOM:
        how = f"drawn at random (seed {options.seed})"
        decision = Decision("expert", places_of(axes, kept), how=how)
    else:
        places = places_of(axes, kept, held, groups=request.groups, alone=alone, tokens=tokens)
        predicting = {layer.name for layer in unseen}
        decision = Decision(
            "expert",
            tuple(replace(place, metric=AIMER) if place.module in predicting else place for place in places),
            metric,
            f"{request.strategy}: the highest of each {'group of a layer' if request.groups > 1 else 'layer'} stay",
            f"every layer keeps {request.minimum} at least" if is_threshold else "",
            thresholds={} if request.groups > 1 or request.released else thresholds,
            origin=origin.read_from(step),
        )
    warning = scarcity_warning(few, kept, held_in(axes), options.min_tokens)
    # Under a global threshold the statistics say how many experts each layer keeps.
    if warning is None and options.strategy != "global-threshold":
        warning = starved(axes, kept)
    return ExpertPlan(
        kept,
        options.dtype,
        step,
        tuple(reasons),
        decision,
        thresholds=thresholds,
        fit=fit,
        warning=warning,
        few=few,
    )


def _of_held(values: Values, axes: Sequence[Axis]) -> Values:
    """The values of the experts that the checkpoint holds, in the order of `Axis.ids`."""
    return {axis.name: values[axis.name][list(axis.ids)] for axis in axes if axis.name in values}


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
    step = _step(checkpoint, options, axes, kept, {})
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
    arguments: Mapping[str, Any],
    measured: Measured | None = None,
) -> dict[str, Any]:
    """The entry for the history.

    Args:
        arguments: how many experts were chosen, and how; empty if a file names them.
        measured: the part of the statistics that they were chosen by. If None, there are no statistics.
    """
    # Without statistics, files that exist hold the means of constants; `mean_outputs` refuses those that are missing.
    is_constant = options.constant
    files = [file for file in options.files if measured is not None or (is_constant and file.is_file())]
    if options.keep is not None:
        files = [Path(options.keep), *files]
    is_text = measured is not None and measured.statistics.mode == "text"
    arguments = {
        **arguments,
        "mtp": options.mtp if options.mtp == "drop" else None,
        "active": options.active,
        "constant_experts": options.constant or None,
        "granularity": None if measured is None else measured.granularity,
        "source": list(options.sources),
        "target": list(options.targets),
        "for": list(options.texts),
        "min_tokens": options.min_tokens if is_text else None,
        "dtype": options.dtype,
    }
    counts = {"before": held_in(axes), "after": sum(map(len, kept.values()))}
    return history_step(COMMAND, checkpoint, given(arguments), files, experts=counts)


def _reasons(
    options: ExpertOptions,
    metric: str,
    measured: Measured | None,
    unseen: Sequence[SparseLayer],
    balance: str | None,
    thresholds: Mapping[str, float],
) -> list[str]:
    """Lines about how the experts were chosen."""
    said = "" if balance is None else f", balance {balance}{'' if options.balance else ' (default)'}"
    where = f", from {', '.join(map(str, options.files))}" if options.files else ""
    thetas = ", ".join(f"{theta:.4f} ({side})" for side, theta in thresholds.items())
    if measured is None:
        how = f"Experts drawn at random (seed {options.seed})"
        if metric == AIMER:
            how = "Metric aimer, of the weights alone"
        reasons, counted = [f"{how}{said}; no statistics are read."], ""
    elif measured.granularity is None:
        implied = "" if options.metric else " (default)"
        texts = f" for {', '.join(options.texts)}" if options.texts else ""
        aimer = "; aimer for layers that predict further tokens, which no text enters" if unseen else ""
        reasons, counted = [f"Metric {metric}{implied}{texts}{where}{aimer}."], ""
    else:
        implied = "" if options.granularity else " (default)"
        reasons = [
            f"Metric {metric}{said}, granularity {measured.granularity}{implied}{_languages(options)}{where}."
        ]
        is_released = measured.statistics.mode == "published"
        counted = ", counted as in the authors' released code" if is_released else ""
    if thresholds:
        reasons.append(f"Threshold theta: {thetas}{counted}.")
    return [*reasons, MIXED] if measured is not None and measured.statistics.mixed else reasons


def _languages(options: ExpertOptions) -> str:
    if not options.sources and not options.targets:
        return ""
    source, target = (", ".join(names) or "any" for names in (options.sources, options.targets))
    return f": {source} to {target}"


def scarcity_warning(few: Mapping[str, Sequence[int]], kept: Kept, held: int, min_tokens: int) -> str | None:
    """What to say before experts go that the text hardly reached: nothing is known of them, not that they are useless.

    Args:
        few: layer's name -> experts that fewer than `min_tokens` were routed to.
        kept: name of the axis -> experts that stay.
        held: experts of the model.
    """
    if not few:
        return None
    lost = sum(
        expert not in kept[axis_name(name, "expert")] for name, experts in few.items() for expert in experts
    )
    named = [f"{name} {len(experts)}" for name, experts in few.items()]
    more = f", {len(named) - LAYERS_SHOWN} more layers" if len(named) > LAYERS_SHOWN else ""
    return (
        f"{sum(map(len, few.values()))} of {held} experts saw fewer than {min_tokens} tokens of this text, too few to "
        f"judge them by; {lost} of these go ({', '.join(named[:LAYERS_SHOWN])}{more}). Collect more text, or lower "
        "--min-tokens."
    )


def read_experts(
    path: Path, axes: Sequence[Axis], sources: Sequence[str] = (), targets: Sequence[str] = ()
) -> dict[str, tuple[int, ...]]:
    """The experts to keep from a file of expert ids: name of the axis -> original ids, ascending.

    Forms: a plain list of ids; `{pair: [ids]}`, of which the pairs of the given sources and targets are
    united; `{language: [ids]}`, of which the encoder takes the given sources' and the decoder the given
    targets'; a selection printed by `--dry-run --json`, or only its `{"kept": {axis: [ids]}}`, with names as on
    disk. An id counts through the original experts of all sparse layers, encoder first; in a selection,
    through those of its layer.

    Args:
        path: the file.
        axes: the experts of each sparse layer, encoder first.
        sources: source languages.
        targets: target languages.

    Raises:
        StatisticsError: damaged, an unknown language, an id that the model or the checkpoint does not hold.
        UsageError: languages that the file does not take, or none where it needs them.
    """
    content = read_json(path)
    if not isinstance(content, (dict, list)) or not content:
        raise StatisticsError(f"{path}: holds no expert ids.")
    is_saved = isinstance(content, dict) and ("format" in content or isinstance(content.get("kept"), dict))
    if isinstance(content, dict) and not is_saved:
        content = _picked(path, content, axes, sources, targets)
    elif sources or targets:
        form = "a saved selection" if is_saved else "a plain list"
        raise UsageError(f"{path} is {form}: it takes no --source and no --target.", "Leave them out.")
    if isinstance(content, dict):
        return read_kept(path, axes, content)
    starts = [0, *accumulate(axis.original for axis in axes)]
    for expert in content:
        if type(expert) is not int or not 0 <= expert < starts[-1]:
            raise StatisticsError(
                f"{path}: {expert!r} is no expert id; the model's go from 0 to {starts[-1] - 1}.",
                f"It has {len(axes)} sparse layers; the published files are for NLLB-200 54.5B.",
            )
    kept = {
        axis.name: [expert - first for expert in content if first <= expert < end]
        for axis, first, end in zip(axes, starts, starts[1:], strict=False)
    }
    return read_kept(path, axes, {"kept": kept})


def _picked(
    path: Path,
    content: Mapping[str, Any],
    axes: Sequence[Axis],
    sources: Sequence[str],
    targets: Sequence[str],
) -> list[int]:
    """The ids under the keys that the languages pick."""

    def ids_of(*keys: str) -> list[int]:
        """The ids under the first of the keys that the file has."""
        key = next((key for key in keys if key in content), None)
        if key is None:
            raise StatisticsError(
                f"{path}: no experts for {keys[0]!r}.", near_names(keys[0], list(content), "Known")
            )
        ids = content[key]
        if not isinstance(ids, list) or not all(type(e) is int for e in ids):
            raise StatisticsError(f"{path}: {key!r} is not a list of expert ids.")
        return ids

    if not sources or not targets:
        raise UsageError(
            f"{path} holds experts by language: name --source and --target.",
            near_names("", list(content), "Known"),
        )
    encoder = sum(axis.original for axis in axes if axis.side == "encoder")
    ids: list[int] = []
    for source in sources:
        for target in targets:
            if f"{source}-{target}" in content:
                ids += ids_of(f"{source}-{target}")
            elif len(sources) == len(targets) == 1 or source != target:
                ids += [e for e in ids_of(source, f"{source}-{ANY}") if e < encoder]
                ids += [e for e in ids_of(target, f"{ANY}-{target}") if e >= encoder]
    if not ids:
        raise UsageError(f"{sources[0]} to {targets[0]} is no translation.", "Name two languages.")
    return ids
