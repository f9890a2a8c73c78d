"""From a checkpoint, statistics and options to a plan: which experts stay. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.errors import UsageError
from prunecli.methods.experts.aimer import aimer_values
from prunecli.methods.experts.budget import Request, balance_text, starved
from prunecli.methods.experts.decision import Chosen, by_file, by_values
from prunecli.methods.experts.measured import (
    Measured,
    given,
    measure_languages,
    measure_texts,
    read_all,
    scarcity_warning,
)
from prunecli.methods.experts.memory_fit import MemoryFit
from prunecli.methods.experts.metrics import AIMER, RANDOM, WITHOUT_STATISTICS, random_values
from prunecli.methods.experts.options import (
    Amount,
    ExpertOptions,
    check_kind,
    default_ratio,
    of_language_model,
)
from prunecli.methods.experts.request import counted_request, layers_of
from prunecli.methods.experts.select import select_experts
from prunecli.methods.experts.selection import read_experts
from prunecli.model.history import given as only_given
from prunecli.model.history import history_step
from prunecli.model.mixtures import predicting_tensors
from prunecli.model.sparse_layer import SparseLayer
from prunecli.model.structure import STATISTICS_OF
from prunecli.progress import Progress, silent
from prunecli.results.gate_matching import other_form
from prunecli.results.gates import GateStatistics
from prunecli.selection.selection import Selection
from prunecli.text.plain import MIXED

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

COMMAND = "prune-experts"

OF_ANOTHER_FORM = (
    "The statistics are of another form of the model ({fingerprint}): {path} is quantised, and its routers have the "
    "same values."
)


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
    is_text = of_language_model(checkpoint)
    check_kind(options, is_text)
    layers, dropped = layers_of(checkpoint, options)
    originals = [layer.original_experts for layer in layers]
    if options.keep is not None:
        return _from_ids(checkpoint, Path(options.keep), options, layers, originals, dropped)
    request, fit = counted_request(checkpoint, options, layers)
    measured = _measured(checkpoint, options, layers, is_text, progress)
    if is_text and options.strategy != "per-layer" and any(layer.is_predicting for layer in layers):
        raise UsageError(
            f"--strategy {options.strategy}: layers that predict further tokens have no statistics to share a "
            "threshold with the others.",
            "Drop them with --mtp drop, or use --strategy per-layer.",
        )
    chosen = select_experts(layers, measured.values, replace(request, released=measured.mode == "published"))
    kept = {**chosen.kept, **dropped}
    is_balanced = request.per_layer is None and request.strategy != "global-threshold"
    balance = (
        balance_text(request.balance) if is_balanced and len({layer.side for layer in layers}) > 1 else None
    )
    reasons = _reasons(
        options, measured, balance, chosen.thresholds, any(layer.is_predicting for layer in layers)
    )
    arguments = _arguments(checkpoint, options, request, measured, balance, fit)
    files = _files_of_means(options) if options.metric in WITHOUT_STATISTICS else options.files
    warning = scarcity_warning(
        measured.few, kept, sum(layer.num_experts for layer in layers), options.min_tokens
    )
    if (
        warning is None and options.strategy != "global-threshold"
    ):  # there the statistics say how many each keeps
        warning = starved(layers, originals, {name: len(ids) for name, ids in kept.items()})
    step = _step(checkpoint, arguments, files, layers, kept)
    if measured.of is not None:
        step[STATISTICS_OF] = measured.of
        reasons = (*reasons, OF_ANOTHER_FORM.format(path=checkpoint.path, fingerprint=measured.of))
    decision = by_values(Chosen(layers, kept, step), measured, request, chosen, options)
    return ExpertPlan(
        _by_axis(kept),
        options.dtype,
        step,
        reasons,
        decision,
        *_besides(checkpoint, options),
        thresholds=chosen.thresholds,
        fit=fit,
        warning=warning,
        few=measured.few,
    )


def _from_ids(
    checkpoint: Checkpoint,
    path: Path,
    options: ExpertOptions,
    layers: Sequence[SparseLayer],
    originals: Sequence[int],
    dropped: Mapping[str, tuple[int, ...]],
) -> ExpertPlan:
    chosen = {
        "--ratio, --fit, --experts-per-layer": options.amount != Amount(),
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
    kept = {**read_experts(path, layers, originals, options.sources, options.targets), **dropped}
    arguments = {
        "source": list(options.sources),
        "target": list(options.targets),
        "mtp": options.mtp if options.mtp == "drop" else None,
        "active": options.active,
        "constant_experts": options.constant or None,
        "for": list(options.texts),
        "dtype": options.dtype,
    }
    step = _step(checkpoint, arguments, (path, *_files_of_means(options)), layers, kept)
    reasons = (f"Experts by {path}{_languages(options)}.",)
    decision = by_file(Chosen(layers, kept, step), path, originals, options.sources, options.targets)
    return ExpertPlan(_by_axis(kept), options.dtype, step, reasons, decision, *_besides(checkpoint, options))


def _by_axis(kept: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    return {f"{name}.experts": ids for name, ids in kept.items()}


def _besides(checkpoint: Checkpoint, options: ExpertOptions) -> tuple[Sequence[str], dict[str, int]]:
    """The tensors that `--mtp drop` removes, and the values in config.json that it and `--active` change."""
    sizes, mixture = checkpoint.resolved.sizes, checkpoint.resolved.family.mixture
    assert mixture is not None
    settings: dict[str, int] = {}
    dropped: Sequence[str] = ()
    if options.mtp == "drop":
        dropped = predicting_tensors(checkpoint, sizes)
        settings = {key: 0 for key in mixture.predicted if sizes.states(key)}
    if options.active is not None and not isinstance(mixture.top_k, int):
        keys = [key for key in mixture.top_k if sizes.states(key)] or mixture.top_k[:1]
        settings |= dict.fromkeys(keys, options.active)
    return dropped, settings


def _files_of_means(options: ExpertOptions) -> tuple[Path, ...]:
    """Statistics that hold the means of constants; `mean_outputs` refuses those that are missing."""
    return tuple(file for file in options.files if options.constant and file.is_file())


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
    return history_step(COMMAND, checkpoint, only_given(arguments), files, experts=counts)


def _measured(
    checkpoint: Checkpoint,
    options: ExpertOptions,
    layers: Sequence[SparseLayer],
    is_text: bool,
    progress: Progress,
) -> Measured:
    """The metric of every original expert, and where it comes from."""
    if options.metric == RANDOM:
        held = {layer.name: layer.original_experts for layer in layers}
        return Measured(random_values(held, options.seed), RANDOM)
    if options.metric == AIMER:
        return Measured(aimer_values(checkpoint, layers, progress=progress), AIMER)
    gates = options.gates
    statistics = (
        given(checkpoint, gates)
        if isinstance(gates, GateStatistics)
        else read_all(checkpoint, options.files, layers)
    )
    if is_text:
        measured = measure_texts(statistics, options.metric, options.texts, layers, options.min_tokens)
        unseen = [layer for layer in layers if layer.is_predicting]  # no forward pass runs them
        values = {**measured.values, **aimer_values(checkpoint, unseen, progress=progress)}
        return replace(measured, values=values, of=other_form(statistics, checkpoint))
    measured = measure_languages(
        statistics, options.metric, options.granularity, options.sources, options.targets
    )
    return replace(measured, of=other_form(statistics, checkpoint))


def _arguments(
    checkpoint: Checkpoint,
    options: ExpertOptions,
    request: Request,
    measured: Measured,
    balance: str | None,
    fit: MemoryFit | None,
) -> dict[str, Any]:
    ratio = options.amount.ratio if fit is None else fit.ratio
    if ratio is None and request.per_layer is None:
        ratio = default_ratio(checkpoint)
    return {
        "ratio": ratio,
        "experts_per_layer": None if request.per_layer is None else dict(request.per_layer),
        "fit_bytes": options.amount.fit,
        "metric": measured.metric,
        "seed": options.seed if measured.metric == RANDOM else None,
        "strategy": options.strategy,
        "balance": balance,
        "min_per_layer": request.minimum,
        "round_to": options.multiple_of if options.multiple_of > 1 else None,
        "mtp": options.mtp if options.mtp == "drop" else None,
        "active": options.active,
        "constant_experts": options.constant or None,
        "granularity": measured.granularity,
        "source": list(options.sources),
        "target": list(options.targets),
        "for": list(options.texts),
        "min_tokens": options.min_tokens if measured.mode == "text" else None,
        "dtype": options.dtype,
    }


def _reasons(
    options: ExpertOptions,
    measured: Measured,
    balance: str | None,
    thresholds: Mapping[str, float],
    is_predicting: bool,
) -> tuple[str, ...]:
    said = "" if balance is None else f", balance {balance}{'' if options.balance else ' (default)'}"
    where = f", from {', '.join(map(str, options.files))}" if options.files else ""
    if measured.metric == AIMER:
        chosen = f"Metric aimer, of the weights alone{said}; no statistics are read."
    elif measured.metric == RANDOM:
        chosen = f"Experts drawn at random (seed {options.seed}){said}; no statistics are read."
    elif measured.mode == "text":
        implied = "" if options.metric else " (default)"
        texts = f" for {', '.join(options.texts)}" if options.texts else ""
        unseen = (
            "; aimer for layers that predict further tokens, which no text enters" if is_predicting else ""
        )
        chosen = f"Metric {measured.metric}{implied}{texts}{where}{unseen}."
    else:
        implied = "" if options.granularity else " (default)"
        chosen = (
            f"Metric {measured.metric}{said}, granularity {measured.granularity}{implied}"
            f"{_languages(options)}{where}."
        )
    thetas = ", ".join(f"{theta:.4f} ({side})" for side, theta in thresholds.items())
    counted = ", counted as in the authors' released code" if measured.mode == "published" else ""
    told = (chosen, f"Threshold theta: {thetas}{counted}.") if thetas else (chosen,)
    return (*told, MIXED) if measured.mixed else told


def _languages(options: ExpertOptions) -> str:
    if not options.sources and not options.targets:
        return ""
    source, target = (", ".join(names) or "any" for names in (options.sources, options.targets))
    return f": {source} to {target}"
