"""Which units stay, and why: what every pruning method returns; and what the smaller checkpoint is made of.

The latter is pure: nothing is read but names and shapes. Units of any kinds are cut at once: experts leave with their
weights and their rows of the router (2212.09811), heads with their rows of query, key and value and their columns of
the output (1905.10650), hidden units with their rows and columns, layers with all that they hold, tokens with their
rows of the embeddings, channels with their rows and columns of all tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np

from prunecli.architectures.records import Carrier, Side
from prunecli.errors import StatisticsError, UnsupportedModelError, UsageError, located
from prunecli.model.axes import Axis, Kind, Rename, axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Decision, Ranked
from prunecli.model.declared import Sizes, with_keys
from prunecli.model.depth import heirs, keeping_layers, renaming_of
from prunecli.model.find_axes import CHANNELS, axes_of
from prunecli.model.history import given, history_step
from prunecli.model.mixtures import experts_per_token
from prunecli.model.quantised import SETTINGS_FILES, renamed, renamed_settings
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.model.structure import KeptUnits, Structure
from prunecli.selection.select import Budget, Kept, Values, held_in
from prunecli.tensors.json_files import read_json, read_object
from prunecli.tensors.stream import Copy, Output, joined
from prunecli.text.files import near_names


@dataclass(frozen=True)
class Selection:
    """Which units stay, and why.

    Attributes:
        kept: name of an axis -> ids of the units that stay (see `Axis.ids`); an axis that is left out keeps all units.
        dtype: type of the result's floating-point tensors (`float16`, `F16`, …). If None, as stored.
        step: the entry for `Structure.history`.
        reasons: lines that say how the units were chosen.
        decision: the values that the units were chosen by. If None, nobody compared them.
        dropped: names of further tensors that are removed.
        settings: further keys of config.json that change (`text_config.top_k` in a nested one), and new values.
        files: side files that differ from the source's, by name. None: the file is left out.
        details: further fields that `--json` prints.
        warning: a line to show before anything is written.
        earlier: selections of other kinds of units that are carried out with this one, see `together`.
    """

    kept: Kept
    dtype: str | None = None
    step: Mapping[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    decision: Decision | None = None
    dropped: Collection[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    details: Mapping[str, object] = field(default_factory=dict)
    warning: str | None = None
    earlier: tuple[Selection, ...] = ()


def together(selections: Sequence[Selection]) -> Selection:
    """One selection of several, of different kinds of units; the history has a step for each, in their order."""
    *earlier, last = selections

    def merged(name: str) -> dict[str, Any]:
        return {key: value for one in selections for key, value in getattr(one, name).items()}

    return Selection(
        merged("kept"),
        last.dtype,
        last.step,
        tuple(reason for one in selections for reason in one.reasons),
        last.decision,
        {name for one in selections for name in one.dropped},
        merged("settings"),
        merged("files"),
        merged("details"),
        earlier=tuple(earlier),
    )


def selection_of(
    options: Any,
    checkpoint: Checkpoint,
    axes: Sequence[Axis],
    decision: Decision,
    arguments: Mapping[str, Any],
    files: Sequence[Path] = (),
    *,
    reasons: Sequence[str] = (),
    notes: Mapping[str, Any] = {},
    **more: Any,
) -> Selection:
    """The units that a decision keeps, with the history entry.

    Args:
        options: options of the command, with its name and the type of the result.
        axes: the axes of the selection; an axis that the decision is not about keeps all units.
        arguments: options that the result depends on; those without a value are left out.
        files: statistics, or a saved selection, that decided.
        notes: further fields of the history entry.
        more: other fields of `Selection`.
    """
    stated = given({**arguments, "dtype": options.dtype})
    step = history_step(options.COMMAND, checkpoint, stated, files, **notes)
    kept = {axis.name: decision.kept.get(axis.name, axis.ids) for axis in axes}
    return Selection(kept, options.dtype, step, tuple(reasons), decision.read_from(step), **more)


def decision_of(
    axes: Sequence[Axis],
    kept: Kept,
    values: Values | None = None,
    budget: Budget | None = None,
    *,
    alone: Mapping[str, Kept] = {},
    tokens: Mapping[str, int] = {},
    metrics: Mapping[str, str] = {},
    **fields: Any,
) -> Decision:
    """The units of `axes` with the values that they were compared by.

    Args:
        axes: the axes that units were chosen from.
        kept: which units stay.
        values: their values. If None, they were compared by nothing.
        budget: the budget, whose words are `how` and `least` of the decision.
        alone: language or text -> units that would stay for it alone, on the axes where it counts.
        tokens: name of an axis -> number of tokens that its values were measured on.
        metrics: name of an axis -> its metric, if another one than that of the decision.
        fields: other fields of `Decision`.
    """
    kind, places, groups = axes[0].kind, [], 1 if budget is None else budget.groups
    if budget is not None and values is not None:
        fields["how"], fields["least"] = budget.words(kind)
    cut = f"{kind}s" if budget is not None and budget.ranks_all else ""
    for axis in axes:
        size = axis.count // groups
        for group in range(groups):
            own = slice(group * size, (group + 1) * size)
            places.append(
                Ranked.of(
                    (axis.name, axis.side, axis.layer),
                    axis.ids[own],
                    kept[axis.name],
                    None if values is None else np.asarray(values[axis.name])[own],
                    attention=axis.attention,
                    tokens=tokens.get(axis.name),
                    metric=metrics.get(axis.name, ""),
                    cut=f"{axis.name}, group {group}" if groups > 1 else cut,
                    alone={
                        text: np.isin(sorted(axis.ids[own]), of_text[axis.name])
                        for text, of_text in alone.items()
                        if axis.name in of_text
                    },
                )
            )
    return Decision(kind, tuple(places), **fields)


def read_kept(path: Path, axes: Sequence[Axis], content: Any = None) -> Kept:
    """Name of each of `axes` -> ids of the units that stay, in the order in which they are stored.

    Args:
        path: JSON with `{"kept": {NAME: [ids]}}`; NAME of the axis, or of the module that holds the units.
        content: content of the file, if the file has been read.

    Raises:
        StatisticsError: damaged, for a model with other axes, or with ids that this checkpoint does not hold.
    """
    content = read_json(path) if content is None else content
    saved = content.get("kept") if isinstance(content, dict) else None
    if not isinstance(saved, dict):
        raise StatisticsError(
            f'{path}: holds no ids under "kept".',
            "Give what a pruning command printed with --json; statistics go with `gates` or `scores`.",
        )
    short = {axis.module: axis.name for axis in axes}
    saved = {short.get(name, name): ids for name, ids in saved.items()}
    names = [axis.name for axis in axes]
    if stray := sorted(set(saved).symmetric_difference(names)):
        raise StatisticsError(
            f"{path}: a selection for another model: {stray[0]} is not in both.",
            near_names(stray[0], sorted(names if stray[0] in saved else saved), "In the other"),
        )
    for axis in axes:
        ids = saved[axis.name]
        if not isinstance(ids, list) or not all(type(number) is int for number in ids):
            raise StatisticsError(
                f"{path}: {axis.name!r} is not a list of ids.", "Print the selection again."
            )
        if absent := sorted(set(ids).difference(axis.ids)):
            raise StatisticsError(
                f"{path}: keeps {axis.kind} {absent[0]} of {axis.name}, which the checkpoint does not hold.",
                "Select from the original model.",
            )
    return {axis.name: tuple(filter(set(saved[axis.name]).__contains__, axis.ids)) for axis in axes}


def num_removed(axes: Sequence[Axis], kept: Kept) -> int:
    """Number of units of `axes` that are not in `kept`."""
    return held_in(axes) - sum(len(kept[axis.name]) for axis in axes)


Places = dict[str, tuple[Axis, tuple[int, ...]]]
"""Name of an axis that loses units -> the axis, and where those that stay lie among its units."""


def cut(source: Checkpoint, selection: Selection) -> Rewrite:
    """The checkpoint with only the units that `selection` keeps, its tensors in the order of the source.

    Units keep the order in which they are stored, and numbers in names count those that stay. What hangs below the name
    of an expert or layer goes with it, whatever it is, so that quantised weights are kept as they are.

    Raises:
        UsageError: no such axis or unit, fewer units than it needs, or a cast of quantised weights.
        UnsupportedModelError: its class says nothing, or no stock class holds the result and none but that runs it.
        CheckpointError: config.json or the weights are damaged.
    """
    axes = axes_beside(source, selection)
    places: Places = {}
    for name, ids in selection.kept.items():
        if name not in axes:
            raise UsageError(f"{name}: the model has no such axis.", f"It has {', '.join(axes)}.")
        axis, wanted = axes[name], set(ids)
        if stray := sorted(wanted.difference(axis.ids)):
            raise UsageError(
                f"{name}: there is no {axis.kind} {stray[0]}.", "Ids are those of the original model."
            )
        if not wanted and axis.kind in ("layer", "unit", "token", "channel"):
            raise UsageError(f"{name}: no {axis.kind} would be left.", "Keep one at least.")
        if axis.kind == "token" and len(wanted) < axis.count and not selection.files:
            raise UsageError(
                "tokens: their tokenizer and the ids in configs change with them.",
                "Choose them by plan_vocabulary.",
            )
        if len(wanted) < axis.count:
            places[name] = axis, tuple(place for place, unit in enumerate(axis.ids) if unit in wanted)
    if any(axis.kind == "expert" for axis in axes.values()):
        _check_routing(source, selection, places)
    _check_alike(axes, places)
    kept_layers = {cast("Side", axis.side): own for axis, own in places.values() if axis.kind == "layer"}
    family = source.resolved.family
    if kept_layers and family.found is not None:
        with located(source.path):
            family.found.try_layers(
                {stack.depth: kept_layers[stack.side] for stack in family.stacks if stack.side in kept_layers}
            )
    rename = renaming_of(family, kept_layers)
    # Tensor that one expert or layer alone has -> its name, by the old numbers of layers, if it stays.
    names: dict[str, str | None] = {**_inherited(source, kept_layers, rename)} if kept_layers else {}
    carriers: dict[str, list[tuple[Carrier, tuple[int, ...], int]]] = {}
    for axis, own in places.values():
        numbers = {old: number for number, old in enumerate(own)}
        for tensor, carrier in axis.carriers.items():
            carriers.setdefault(tensor, []).append((carrier, own, axis.count))
        for part, place in product(axis.parts, range(axis.count)):
            before, after = (
                f"{axis.members.format(number)}.{part}" for number in (place, numbers.get(place))
            )
            names[before] = after if place in numbers else None
    dropped = set(selection.dropped)
    outputs = []
    for name, info in source.tensors.items():
        member = names.get(name, name)
        new = None if member is None or name in dropped else rename(member)
        shape = [*info.shape]
        taken = []
        for carrier, own, held in carriers.get(name, ()):
            ranges = tuple(joined(carrier.ranges(own, shape[carrier.dim], held)))
            shape[carrier.dim] = sum(stop - start for start, stop in ranges)
            new = new if own else None  # a tensor of no head at all is not stored
            taken.append((carrier.dim, ranges))
        if new is not None:
            outputs.append(Output(new, info.dtype, tuple(shape), Copy(name, tuple(sorted(taken)))))
    structure = _structure(source, places, kept_layers)
    for one in selection.earlier:
        structure = structure.after(one.step)
    rewrite = rewritten(source, structure, outputs, selection.step, selection.decision, selection.dtype)
    rewrite = replace(rewrite, earlier=tuple(one.decision for one in selection.earlier if one.decision))
    sizes = {key: len(own) for axis, own in places.values() for key in axis.keys}
    config = rewrite.config
    if CHANNELS in places:
        with located(source.path):
            config = source.probed.with_channels(config, len(places[CHANNELS][1]))
    config = with_keys(config, {**selection.settings, **sizes})
    rename_setting = _renaming(source, places)
    beside = {
        path.name: json.dumps(new, indent=2).encode()
        for path in source.side_files.carried
        if path.name in SETTINGS_FILES and (new := renamed(old := read_object(path), rename_setting)) != old
    }
    return replace(
        rewrite,
        config=renamed_settings(config, rename_setting),
        files={**rewrite.files, **beside, **selection.files},
    )


def axes_beside(source: Checkpoint, selection: Selection) -> dict[str, Axis]:
    """The axes of the kinds that `selection` names, by their names, in the order of the model."""
    kinds = dict.fromkeys(map(kind_of, selection.kept))
    return {axis.name: axis for kind in kinds for axis in axes_of(source, kind)}


def kind_of(axis: str) -> Kind:
    """The kind of units of an axis, by its name."""
    return cast("Kind", axis.rpartition(".")[2].removesuffix("s"))


def _check_routing(source: Checkpoint, selection: Selection, places: Places) -> None:
    """Refuse layers with fewer experts than the router picks, or with groups of different sizes."""
    family = source.resolved.family
    assert family.mixture is not None
    top_k = experts_per_token(Sizes(family, with_keys(source.config, selection.settings)), family.mixture)
    for layer in source.mixtures:
        name = axis_name(layer.name, "expert")
        if name not in places or layer.router_tensors[0] in selection.dropped:
            continue
        _, own = places[name]
        groups, width = layer.groups, layer.num_experts // layer.groups.count
        sizes = [sum(place // width == group for place in own) for group in range(groups.count)]
        if len(set(sizes)) > 1:
            raise UsageError(
                f"{layer.name} would keep {', '.join(map(str, sizes))} experts of its {groups.count} groups; the "
                "router takes as many for each, one group after another.",
                f"Keep as many of each {width} experts.",
            )
        if len(own) < (needed := groups.needed(top_k)):
            raise UsageError(
                f"{layer.name} would keep {len(own)} experts; the router picks {top_k} for each token.",
                f"Keep {needed} at least.",
            )


def _check_alike(axes: Mapping[str, Axis], places: Places) -> None:
    """Refuse axes that keep other numbers of units than those that the same key of config.json counts."""
    counts: dict[str, dict[int, str]] = {}
    for name, axis in axes.items():
        for key in axis.keys:
            counts.setdefault(key, {})[len(places[name][1] if name in places else axis.ids)] = name
    for key, names in counts.items():
        if len(names) > 1:
            (one, first), (other, second) = [*names.items()][:2]
            raise UsageError(
                f"{first} would keep {one:,} units and {second} {other:,}; config.json has one number for both "
                f'("{key}").',
                "Keep the same number everywhere.",
            )


def _inherited(source: Checkpoint, kept: Mapping[Side, Sequence[int]], rename: Rename) -> dict[str, str]:
    """Tensor of a layer that goes, and which others need -> its name in the first of these, by the old numbers.

    That is a table of positions of a stack's first layer, and an attention or FFN that other layers run too.
    """
    layout = source.layout
    moved: dict[str, str] = {}
    for stack in layout.family.stacks:
        first = stack.layers.format(layer=kept.get(stack.side, (0,))[0])
        moved |= {
            f"{stack.layers.format(layer=0)}.{spec.name}": f"{first}.{spec.name}"
            for attention in stack.attentions
            for spec in attention.tensors
            if spec.first
        }
    names = {part.name: part.tensor_names for part in (*layout.ffns, *layout.attentions)}
    for owner, heir in heirs(source.structure, rename).items():
        moved |= dict(zip(names[owner], names[heir], strict=True))
    return moved


def _structure(source: Checkpoint, places: Places, layers: Mapping[Side, Sequence[int]]) -> Structure:
    """How the result differs from the original model."""
    structure = source.structure
    kept = {
        name: KeptUnits(tuple(axis.ids[place] for place in own), axis.original)
        for name, (axis, own) in places.items()
        if axis.kind in ("head", "expert")
    }
    structure = replace(structure, axes={**structure.axes, **kept})
    units = {axis.module: len(own) for axis, own in places.values() if axis.kind == "unit" and not axis.keys}
    if units:
        stock = {ffn.name: ffn.stated for ffn in source.layout.ffns}
        widths = {name: width for name, width in units.items() if width != stock[name]}
        structure = structure.changing(units, {}, (), widths)
    return keeping_layers(source.layout.sizes, structure, layers) if layers else structure


def _renaming(source: Checkpoint, places: Places) -> Callable[[str], str | None]:
    """Return the new name, None if it goes, of a module that settings of a quantisation name.

    Raises (the function):
        UnsupportedModelError: a number that is in no name of an expert or layer: in a pattern, of many perhaps.
    """
    patterns = []
    numbered = {}
    for axis, own in places.values():
        if axis.members:
            kind = axis.kind
            parent, _, unit = axis.members.rpartition(".")
            model, _, rest = parent.partition(".")  # which the settings may leave out
            before = rf"(?:^|(?<={re.escape(model)}\.))" if rest else "^"
            number = unit.replace("{}", r"(\d+)")
            pattern = re.compile(rf"{before}{re.escape(rest or model)}\.{number}(?=$|\.)")
            patterns.append((kind, pattern, {old: new for new, old in enumerate(own)}))
            column = parent.rpartition(".")[2]
            loose = r"experts?\\?[._](?:expert_)?\d" if kind == "expert" else rf"{column}\\?\.[\[(\\?:]*\d"
            numbered[kind] = re.compile(loose)
    patterns.sort(key=lambda one: one[0])  # names of experts hold the number that their layer had
    modules = [
        f"{axis.module}.".removeprefix("model.") for axis, _ in places.values() if axis.kind == "expert"
    ]

    def rename(text: str) -> str | None:
        new_text, found = text, set()
        for kind, pattern, numbers in patterns:
            if match := pattern.search(new_text):
                new = numbers.get(int(match[1]))
                if new is None:
                    return None
                new_text = f"{new_text[: match.start(1)]}{new}{new_text[match.end(1) :]}"
                found.add(kind)
        for kind, loose in numbered.items():
            # Experts of other layers keep their numbers.
            is_other = (
                kind == "expert" and not text.startswith("re:") and not any(one in text for one in modules)
            )
            if kind not in found and not is_other and loose.search(text):
                raise UnsupportedModelError(
                    f'{source.path}: the quantisation settings name {kind}s by number: "{text}"',
                    "prunecli cannot say which of them are kept; write the names of single modules there.",
                )
        return new_text

    return rename
