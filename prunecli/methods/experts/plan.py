"""Decide which experts to keep, from a checkpoint, statistics and options. Nothing is written.

A removed expert may become a constant: the mean of its outputs (2507.00390, MoNE). Routers stay as they are then.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from prunecli.errors import PruneError, StatisticsError, UnsupportedModelError, UsageError
from prunecli.methods.experts.metrics import (
    AIMER,
    MOST_ALONE,
    RANDOM,
    aimer_values,
    default_metric,
    measure_languages,
    measure_texts,
    metric_values,
    read_all,
)
from prunecli.methods.experts.options import (
    balance_text,
    check_kind,
    layers_of,
    of_language_model,
    request_of,
    smallest_ratio,
    starved,
)
from prunecli.methods.options import ExpertOptions
from prunecli.methods.units import Ranking, drawn, plan
from prunecli.model.axes import Axis, axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.cost import usual_load
from prunecli.model.decision import Floats, Origin
from prunecli.model.declared import with_keys
from prunecli.model.find_axes import axes_of
from prunecli.model.mixtures import predicting_tensors
from prunecli.model.quantised import method_of
from prunecli.model.rewrite import Rewrite, replacing, rewritten
from prunecli.model.sparse_layer import CONSTANT, SparseLayer
from prunecli.model.structure import STATISTICS_OF
from prunecli.progress import Progress, silent
from prunecli.results.gates import ANY, GateSums, added, outputs_path, ratio, read_outputs
from prunecli.results.matching import other_form
from prunecli.selection.cut import Selection, decision_of, read_kept, selection_of
from prunecli.selection.select import Kept, Values, held_in
from prunecli.tensors.json_files import read_json
from prunecli.tensors.stream import Output, given
from prunecli.text.files import near_names

LAYERS_SHOWN = 6


def plan_experts(checkpoint: Checkpoint, options: ExpertOptions, progress: Progress = silent) -> Selection:
    """Choose the experts to keep. Weights are read only for the metric `aimer`.

    A dropped multi-token-prediction layer keeps none. `details` has the memory of the result, if `fit` was given.

    Raises:
        CheckpointError: weights that hold what is no number.
        UnsupportedModelError: its class says nothing, or has no experts.
        StatisticsError: damaged files, of another model, or without these languages.
        UsageError: options that contradict each other or leave too few experts.
    """
    checkpoint.refuse_constants()
    check_kind(options, of_language_model(checkpoint))
    layers = layers_of(checkpoint, options)
    chosen_in = {layer.name for layer in layers}
    every = axes_of(checkpoint, "expert")
    axes = [axis for axis in every if axis.module in chosen_in]
    sizes, mixture = checkpoint.resolved.sizes, checkpoint.resolved.family.mixture
    assert mixture is not None
    settings: dict[str, int] = {}
    dropped: Sequence[str] = ()
    if options.mtp == "drop":
        settings = {key: 0 for key in mixture.predicted if sizes.states(key)}
        dropped = predicting_tensors(checkpoint, sizes)
    if options.active is not None and not isinstance(mixture.top_k, int):
        keys = [key for key in mixture.top_k if sizes.states(key)] or mixture.top_k[:1]
        settings |= dict.fromkeys(keys, options.active)
    if options.keep is None:
        made = _by_metric(checkpoint, options, layers, axes, progress)
    else:
        path = Path(options.keep)
        named = read_experts(path, axes, options.sources, options.targets)
        pairs = [pair for pair in product(options.sources, options.targets) if pair[0] != pair[1]]
        alone = {}
        for source, target in pairs if 1 < len(pairs) <= MOST_ALONE else ():
            with suppress(PruneError):  # the file may have no experts for a single pair
                alone[f"{source}-{target}"] = read_experts(path, axes, (source,), (target,))
        origin = Origin(texts=tuple(map("-".join, pairs)))
        made = selection_of(
            options,
            checkpoint,
            axes,
            decision_of(axes, named, alone=alone, how=f"named in {path.name}", origin=origin),
            options.recorded(),
            [path, *_files_of_constants(options)],
            reasons=[f"Experts by {path}{_languages(options)}."],
        )
    counts = {"before": held_in(axes), "after": sum(map(len, made.kept.values()))}
    kept = {axis.name: made.kept.get(axis.name, ()) for axis in every}
    return replace(made, kept=kept, step={**made.step, "experts": counts}, settings=settings, dropped=dropped)


def _by_metric(
    checkpoint: Checkpoint,
    options: ExpertOptions,
    layers: Sequence[SparseLayer],
    axes: Sequence[Axis],
    progress: Progress,
) -> Selection:
    """The experts with the highest values."""
    budget, fit = request_of(checkpoint, options, layers), None
    ratio = budget.ratio
    if options.fit is not None:
        load = usual_load(checkpoint, **options.load)
        found = smallest_ratio(checkpoint, options.fit, load, budget, dtype=options.dtype)
        ratio, budget = found.ratio, replace(budget, ratio=None, count=found.held - found.keep)
        fit = {**vars(found), **vars(load)}
    is_text = of_language_model(checkpoint)
    if budget.scope != "axis" and is_text and any(layer.is_predicting for layer in layers):
        raise UsageError(
            f"`strategy={options.strategy}`: layers that predict further tokens have no statistics to share a "
            "threshold with the others.",
            "Drop them with `mtp=drop`, or use `strategy=per-layer`.",
        )
    has_balance = (
        budget.scope != "model" and not options.experts_per_layer and len({axis.side for axis in axes}) > 1
    )
    balance = balance_text(budget.balance) if has_balance and budget.balance else None
    note = "" if balance is None else f", balance {balance}{'' if options.balance else ' (default)'}"
    measured, reasons, notes, few = None, list[str](), dict[str, Any](), dict[str, tuple[int, ...]]()
    if options.metric == RANDOM:
        ranking = drawn(axes, options.seed, note)
    elif options.metric == AIMER:
        values = _of_held(aimer_values(checkpoint, layers, progress=progress), axes)
        ranking = Ranking(values, AIMER, note=f", of the weights alone{note}")
    else:
        statistics = read_all(checkpoint, options.gates, layers)
        metric = options.metric or default_metric(statistics)
        unseen: Sequence[SparseLayer] = ()
        if is_text:
            measured = measure_texts(statistics, options.texts)
            unseen = [layer for layer in layers if layer.is_predicting]  # no forward pass runs them
            note += f" for {', '.join(options.texts)}" if options.texts else ""
        else:
            measured = measure_languages(statistics, options.granularity, options.sources, options.targets)
            default = "" if options.granularity else " (default)"
            note += f", granularity {measured.granularity}{default}{_languages(options)}"
            budget = replace(budget, released=statistics.mode == "published")

        def values_of(sums: GateSums) -> dict[str, Any]:
            return _of_held(metric_values(metric, sums, statistics), axes)

        values = values_of(measured.sums)
        if unseen:
            values |= _of_held(aimer_values(checkpoint, unseen, progress=progress), axes)
            reasons.append("By aimer for layers that predict further tokens, which no text enters.")
        if (other := other_form(statistics, checkpoint)) is not None:
            notes[STATISTICS_OF] = other
            reasons.append(
                f"The statistics are of another form of the model ({other}): {checkpoint.path} is quantised, and its "
                "routers have the same values."
            )
        many = (f"{len(measured.texts):,} pairs or texts",)
        texts = tuple(measured.texts) if len(measured.texts) <= MOST_ALONE else many
        sides = {axis.name: axis.side for axis in axes}
        layer_tokens = zip(statistics.axes, measured.sums.tokens.tolist(), strict=True)
        for layer, counts in zip(statistics.layers, measured.sums.get("routed", ()), strict=False):
            held = (axis.ids for axis in axes if axis.module == layer)
            if rare := tuple(expert for ids in held for expert in ids if counts[expert] < MIN_TOKENS):
                few[layer] = rare
        ranking = Ranking(
            values,
            metric,
            is_default=options.metric is None,
            note=note,
            files=options.files,
            origin=Origin(texts=texts, split=statistics.split),
            tokens={} if budget.released else {axis.name: count for axis, count in layer_tokens},
            mixed=statistics.mixed,
            alone={
                name: {axis: own for axis, own in values_of(sums).items() if side in (None, sides[axis])}
                for name, (sums, side) in measured.alone.items()
            },
            metrics={axis_name(layer.name, "expert"): AIMER for layer in unseen},
        )
    arguments = {
        "ratio": ratio,
        "experts_per_layer": options.experts_per_layer,
        "fit_bytes": options.fit,
        "metric": ranking.metric or options.metric,
        "strategy": options.strategy,
        "balance": balance,
        "min": budget.least,
        "granularity": measured and measured.granularity,
    }
    ranking = replace(ranking, files=ranking.files or _files_of_constants(options))
    made = plan(checkpoint, options, axes, budget, ranking, arguments, reasons=reasons, notes=notes)
    warning = scarcity_warning(few, made.kept, held_in(axes))
    # Under a global threshold the statistics say how many experts each layer keeps.
    if warning is None and budget.scope != "model":
        warning = starved(axes, made.kept)
    more = {name: own for name, own in {"fit": fit, "few_tokens": few}.items() if own}
    return replace(made, details={**notes, **made.details, **more}, warning=warning)


def _of_held(values: Values, axes: Sequence[Axis]) -> dict[str, Any]:
    """The values of the experts that the checkpoint holds, in the order of `Axis.ids`."""
    return {axis.name: values[axis.name][list(axis.ids)] for axis in axes if axis.name in values}


def _files_of_constants(options: ExpertOptions) -> list[Path]:
    """Files of statistics that hold the means of constants; `mean_outputs` refuses missing ones."""
    return [file for file in options.files if options.constant and file.is_file()]


def _languages(options: ExpertOptions) -> str:
    if not options.sources and not options.targets:
        return ""
    source, target = (", ".join(names) or "any" for names in (options.sources, options.targets))
    return f": {source} to {target}"


MIN_TOKENS = 100
"""Fewer tokens are too few to judge an expert by. In a small Qwen3-MoE (6 layers of 32 experts) g‖f‖ spreads over an
expert's tokens by its mean, and neighbours in the order by REAP differ by 7 to 8 %: judged by 10 successive tokens of
its own, an expert is 22 to 29 % off and moves by 2 to 4 places of 32, by 100 of them 7 to 13 % and 1 to 2 places."""


def scarcity_warning(few: Mapping[str, Sequence[int]], kept: Kept, held: int) -> str | None:
    """The warning about experts that received few tokens: rankings of such experts are unreliable.

    Args:
        few: layer's name -> experts that fewer than `MIN_TOKENS` were routed to.
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
        f"{sum(map(len, few.values()))} of {held} experts received fewer than {MIN_TOKENS} tokens of this text "
        f"({', '.join(named[:LAYERS_SHOWN])}{more}), too few to judge them by; the result lacks {lost} of them. "
        "Collect more text."
    )


def read_experts(
    path: Path, axes: Sequence[Axis], sources: Sequence[str] = (), targets: Sequence[str] = ()
) -> Kept:
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
        by_key = content

        def ids_of(*keys: str) -> list[int]:
            """The ids under the first of the keys that the file has."""
            key = next((key for key in keys if key in by_key), None)
            if key is None:
                raise StatisticsError(f"{path}: no experts for {keys[0]!r}.", near_names(keys[0], by_key))
            ids = by_key[key]
            if not isinstance(ids, list) or not all(type(e) is int for e in ids):
                raise StatisticsError(f"{path}: {key!r} is not a list of expert ids.")
            return ids

        if not sources or not targets:
            raise UsageError(
                f"{path} holds experts by language: name `sources` and `targets`.", near_names("", by_key)
            )
        encoder = sum(axis.original for axis in axes if axis.side == "encoder")
        content = []
        for source, target in product(sources, targets):
            if f"{source}-{target}" in by_key:
                content += ids_of(f"{source}-{target}")
            elif len(sources) == len(targets) == 1 or source != target:
                content += [e for e in ids_of(source, f"{source}-{ANY}") if e < encoder]
                content += [e for e in ids_of(target, f"{ANY}-{target}") if e >= encoder]
    elif sources or targets:
        form = "a saved selection" if is_saved else "a plain list"
        raise UsageError(f"{path} is {form}: it takes no `sources` and no `targets`.", "Leave them out.")
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
        axis.name: [expert - first for expert in content if expert - first in range(axis.original)]
        for axis, first in zip(axes, starts, strict=False)
    }
    return read_kept(path, axes, {"kept": kept})


KEY = "approximate_experts"

Means = Mapping[str, Floats]
"""Layer's name -> `[original experts, width]`."""


def mean_outputs(checkpoint: Checkpoint, files: Sequence[Path], texts: Sequence[str]) -> Means:
    """E[f] of every expert over the tokens routed to it, 0 where there are none.

    Args:
        files: statistics, each with the sums of outputs beside it.
        texts: names of the texts to count. If empty, all.

    Raises:
        StatisticsError: damaged files, of another model, or without sums of outputs.
    """
    statistics = read_all(checkpoint, files, checkpoint.require_routed())
    measured, parts = measure_texts(statistics, texts), []
    for file in files:
        fingerprint, part = read_outputs(outputs_path(file))
        if fingerprint != statistics.fingerprint:  # that of every file, or they would not be merged
            raise StatisticsError(
                f"{outputs_path(file)}: is of another run than {file}",
                "Collect both again with `mean_outputs`.",
            )
        parts.append(part)
    return {
        layer: ratio(added(parts, measured.texts, layer), measured.sums.routed[row][:, None])
        for row, layer in enumerate(statistics.layers)
    }


def rewrite_constant(checkpoint: Checkpoint, plan: Selection, means: Means) -> Rewrite:
    """The checkpoint with constants in the place of the experts that the plan does not keep.

    Experts that stay keep their numbers, so that vLLM opens the result: `approximate_experts` in its config names the
    others, `approx_value` below an expert's name is the constant.

    Raises:
        UnsupportedModelError: quantised or stacked experts, or layers that predict further tokens and are not dropped.
        UsageError: the layer keeps no expert.
    """
    replaced: dict[str, Sequence[Output]] = dict.fromkeys(plan.dropped, ())
    constants: dict[str, tuple[int, ...]] = {}
    numbers: dict[str, list[int]] = {}
    for layer in checkpoint.require_mixtures():
        if layer.router_tensors[0] in plan.dropped:
            continue
        fault = None
        if method_of(checkpoint.config):
            fault = "the weights are quantised"
        elif layer.stacked_tensors:
            fault = f"the experts of {layer.name} are stacked in one tensor"
        elif layer.name not in means:
            fault = f"no text enters {layer.name}, which predicts further tokens (`mtp=drop` removes it)"
        if fault is not None:
            raise UnsupportedModelError(
                f"{checkpoint.path}: {fault}, so that constants cannot stand for experts",
                "Leave `constant` out.",
            )
        kept = set(plan.kept[axis_name(layer.name, "expert")])
        if not kept & set(layer.experts):
            raise UsageError(f"{layer.name} would keep no expert.", "Keep more experts.")
        places = [place for place, expert in enumerate(layer.experts) if expert not in kept]
        if places:
            constants[layer.name] = tuple(layer.experts[place] for place in places)
            numbers[str(layer.layer)] = places
        for place in places:
            first, *others = (layer.expert_tensor(place, suffix) for suffix in layer.expert_tensors)
            mean, constant = means[layer.name][layer.experts[place]], layer.expert_tensor(place, CONSTANT)
            replaced[first] = [Output(constant, checkpoint.info(first).dtype, mean.shape, given(mean))]
            replaced |= dict.fromkeys(others, ())
    structure, config = checkpoint.structure, dict(plan.settings)
    if numbers:
        structure = replace(structure, constants=constants)
        mixture = checkpoint.resolved.family.mixture
        inner = "text_config." if mixture and mixture.counts[0].startswith("text_config.") else ""
        config[f"{inner}{KEY}"] = numbers
    outputs = replacing(checkpoint, replaced)
    rewrite = rewritten(checkpoint, structure, outputs, plan.step, plan.decision, plan.dtype)
    return replace(rewrite, config=with_keys(rewrite.config, config))
