"""From a checkpoint, statistics and options to a plan: which experts stay. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.experts.budget import (
    MIN_PER_LAYER,
    Request,
    Strategy,
    balance_text,
    default_balance,
    keep_count,
    starved,
)
from prunecli.methods.experts.granularity import aggregate, default_granularity
from prunecli.methods.experts.memory_fit import MemoryFit, smallest_ratio
from prunecli.methods.experts.metrics import DEFAULT_METRIC, RANDOM, Values, metric_values, random_values
from prunecli.methods.experts.select import Selection, select_experts
from prunecli.methods.experts.selection import read_experts
from prunecli.model.history import given, history_step
from prunecli.model.mixtures import SparseLayer
from prunecli.results.gate_matching import check_matches, numbered
from prunecli.results.gates import GateStatistics, Mode, merge
from prunecli.results.published import read_gates

if TYPE_CHECKING:
    from prunecli.architectures.records import Side
    from prunecli.model.checkpoint import Checkpoint

COMMAND = "prune-experts"
DEFAULT_RATIO = 0.8
"""The published choice."""


@dataclass(frozen=True)
class Amount:
    """How many experts go; at most one is given, none means DEFAULT_RATIO.

    Attributes:
        ratio: fraction of the experts that the checkpoint holds to remove.
        fit: bytes of memory that the result must fit in.
        per_layer: experts to keep in each layer of a side.
    """

    ratio: float | None = None
    fit: int | None = None
    per_layer: Mapping[Side, int] | None = None


@dataclass(frozen=True)
class ExpertOptions:
    """What `prune-experts` is asked.

    Attributes:
        gates: statistics, or files of them, merged; not looked at for the metric `random`.
        experts: a file of expert ids, instead of statistics and amount.
        amount: how many experts go.
        metric: a name of METRICS, or `random`.
        strategy: the algorithm of 4.3.
        balance: encoder experts per decoder expert; None: by the experts of a layer (`default_balance`).
        minimum: experts to keep in each layer; None: the router's top-k, or 4 under a threshold.
        granularity: None: by language where a source or target is given, else global.
        sources: languages to translate from.
        targets: languages to translate into.
        dtype: type of the result; None: as stored. `fit` reckons with it.
        seed: of the metric `random`.
        load: `batch`, `beam` and `length` that `fit` reckons with.
    """

    gates: tuple[Path, ...] | GateStatistics = (Path("gates.json"),)
    experts: Path | None = None
    amount: Amount = field(default_factory=Amount)
    metric: str = DEFAULT_METRIC
    strategy: Strategy = "per-layer"
    balance: Fraction | None = None
    minimum: int | None = None
    granularity: str | None = None
    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    dtype: str | None = None
    seed: int = 0
    load: Mapping[str, int] = field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of statistics; none where they are given themselves."""
        return () if isinstance(self.gates, GateStatistics) else self.gates


@dataclass(frozen=True)
class ExpertPlan:
    """Which experts stay, and why.

    Attributes:
        kept: layer's name -> original ids that stay; a layer that is left out keeps all.
        dtype: type of the result's floating-point tensors (`float16`, `F16`, …); None: as stored.
        thresholds: theta of eq. 5 under `"model"`, or of each side; empty for per-layer.
        step: the entry for `Structure.history`.
        reasons: plain lines that say how the experts were chosen.
        fit: the arithmetic, where a memory was given.
        warning: what to say before anything is written.
    """

    kept: Mapping[str, Sequence[int]]
    dtype: str | None = None
    thresholds: Mapping[str, float] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    fit: MemoryFit | None = None
    warning: str | None = None

    @property
    def count(self) -> int:
        """Experts kept in the layers that it names."""
        return sum(map(len, self.kept.values()))


def plan_experts(checkpoint: Checkpoint, options: ExpertOptions) -> ExpertPlan:
    """Choose the experts to keep.

    Raises:
        UnsupportedModelError: the family is not declared, or has no experts.
        StatisticsError: damaged files, of another model, or without these languages.
        UsageError: options that contradict each other or leave too few experts.
    """
    layers = checkpoint.require_mixtures()
    originals = [layer.original_experts for layer in layers]
    if options.experts is not None:
        return _from_ids(checkpoint, options.experts, options, layers, originals)
    request, fit = _request(checkpoint, options, layers, checkpoint.require_architecture().top_k or 1)
    values, granularity, mode = _values(checkpoint, options, layers)
    selection = select_experts(layers, values, replace(request, released=mode == "published"))
    is_balanced = request.per_layer is None and request.strategy != "global-threshold"
    balance = (
        balance_text(request.balance) if is_balanced and len({layer.side for layer in layers}) > 1 else None
    )
    reasons = _reasons(options, granularity, balance, mode, selection)
    arguments = _arguments(options, request, granularity, balance, fit)
    files = () if options.metric == RANDOM else options.files
    warning = None
    if options.strategy != "global-threshold":  # there the statistics decide how many each layer keeps
        warning = starved(layers, originals, {name: len(ids) for name, ids in selection.kept.items()})
    step = _step(checkpoint, arguments, files, layers, selection.kept)
    return ExpertPlan(
        selection.kept, options.dtype, selection.thresholds, step, reasons, fit=fit, warning=warning
    )


def _from_ids(
    checkpoint: Checkpoint,
    path: Path,
    options: ExpertOptions,
    layers: Sequence[SparseLayer],
    originals: Sequence[int],
) -> ExpertPlan:
    if options.amount != Amount():
        raise UsageError(
            "--experts names what stays; it goes with none of --ratio, --fit, --experts-per-layer.",
            "Leave them out, or select from statistics with --gates.",
        )
    kept = read_experts(path, layers, originals, options.sources, options.targets)
    arguments = {"source": list(options.sources), "target": list(options.targets), "dtype": options.dtype}
    step = _step(checkpoint, arguments, (path,), layers, kept)
    reasons = (f"Experts by {path}{_languages(options)}.",)
    return ExpertPlan(kept, options.dtype, step=step, reasons=reasons)


def _step(
    checkpoint: Checkpoint,
    arguments: Mapping[str, Any],
    files: Sequence[Path],
    layers: Sequence[SparseLayer],
    kept: Mapping[str, Sequence[int]],
) -> dict[str, Any]:
    counts = {
        "before": sum(layer.num_experts for layer in layers),
        "after": sum(map(len, kept.values())),
    }
    return history_step(COMMAND, checkpoint, given(arguments), files, experts=counts)


def _request(
    checkpoint: Checkpoint, options: ExpertOptions, layers: Sequence[SparseLayer], top_k: int
) -> tuple[Request, MemoryFit | None]:
    amount = options.amount
    if sum(given is not None for given in (amount.ratio, amount.fit, amount.per_layer)) > 1:
        raise UsageError(
            "Give one of --ratio, --fit, --experts-per-layer.", "Each says how many experts stay."
        )
    minimum = options.minimum
    if minimum is None:
        minimum = top_k if options.strategy == "per-layer" else max(top_k, MIN_PER_LAYER)
    if minimum < top_k:
        raise UsageError(f"--min-per-layer {minimum}: the router picks {top_k} experts for each token.")
    balance = options.balance or default_balance(layer.original_experts for layer in layers)
    request = Request(None, amount.per_layer, options.strategy, balance, minimum)
    if amount.per_layer is not None:
        return request, None
    held = sum(len(layer.experts) for layer in layers)
    fit = None
    if amount.fit is None:
        keep = keep_count(DEFAULT_RATIO if amount.ratio is None else amount.ratio, held)
    else:
        fit = smallest_ratio(checkpoint, amount.fit, dtype=options.dtype, request=request, **options.load)
        keep = fit.keep
    return replace(request, keep=keep), fit


def _values(
    checkpoint: Checkpoint, options: ExpertOptions, layers: Sequence[SparseLayer]
) -> tuple[Mapping[str, Values], str | None, Mode | None]:
    """The metric of every original expert, the granularity that it was summed by, and how the gates were collected."""
    if options.metric == RANDOM:
        return (
            random_values({layer.name: layer.original_experts for layer in layers}, options.seed),
            None,
            None,
        )
    if isinstance(options.gates, GateStatistics):
        statistics = numbered(options.gates, checkpoint)
        check_matches(statistics, checkpoint)
    else:
        statistics = read_all(checkpoint, options.gates, layers)
    granularity = options.granularity or default_granularity(options.sources, options.targets)
    sums = aggregate(statistics, granularity, options.sources, options.targets)
    return metric_values(options.metric, sums, statistics), granularity, statistics.mode


def read_all(
    checkpoint: Checkpoint, paths: Sequence[Path], layers: Sequence[SparseLayer] | None = None
) -> GateStatistics:
    """The statistics of several files, merged, of this checkpoint or of one that it was made from.

    Raises:
        StatisticsError: damaged files, of another model, or that do not go together.
    """
    layers = checkpoint.require_mixtures() if layers is None else layers
    names, experts = [layer.name for layer in layers], max(layer.original_experts for layer in layers)
    parts = []
    for path in paths:
        if not path.exists():
            raise StatisticsError(f"{path}: no such file", "Collect it first: prunecli collect-gates.")
        parts.append(numbered(read_gates(path, names, experts), checkpoint))
        try:
            check_matches(parts[-1], checkpoint)
        except StatisticsError as error:
            raise StatisticsError(f"{path}: {error.message}", error.remedy) from error
    return merge(parts, [str(path) for path in paths])


def _arguments(
    options: ExpertOptions,
    request: Request,
    granularity: str | None,
    balance: str | None,
    fit: MemoryFit | None,
) -> dict[str, Any]:
    ratio = options.amount.ratio if fit is None else fit.ratio
    if ratio is None and request.per_layer is None:
        ratio = DEFAULT_RATIO
    return {
        "ratio": ratio,
        "experts_per_layer": None if request.per_layer is None else dict(request.per_layer),
        "fit_bytes": options.amount.fit,
        "metric": options.metric,
        "seed": options.seed if options.metric == RANDOM else None,
        "strategy": options.strategy,
        "balance": balance,
        "min_per_layer": request.minimum,
        "granularity": granularity,
        "source": list(options.sources),
        "target": list(options.targets),
        "dtype": options.dtype,
    }


def _reasons(
    options: ExpertOptions,
    granularity: str | None,
    balance: str | None,
    mode: Mode | None,
    selection: Selection,
) -> tuple[str, ...]:
    said = "" if balance is None else f", balance {balance}{'' if options.balance else ' (default)'}"
    if granularity is None:
        chosen = f"Experts drawn at random (seed {options.seed}){said}; no statistics are read."
    else:
        implied = "" if options.granularity else " (default)"
        where = f", from {', '.join(map(str, options.files))}" if options.files else ""
        chosen = (
            f"Metric {options.metric}{said}, granularity {granularity}{implied}{_languages(options)}{where}."
        )
    thetas = ", ".join(f"{theta:.4f} ({side})" for side, theta in selection.thresholds.items())
    counted = ", counted as in the authors' released code" if mode == "published" else ""
    return (chosen, f"Threshold theta: {thetas}{counted}.") if thetas else (chosen,)


def _languages(options: ExpertOptions) -> str:
    if not options.sources and not options.targets:
        return ""
    source, target = (", ".join(names) or "any" for names in (options.sources, options.targets))
    return f": {source} to {target}"
