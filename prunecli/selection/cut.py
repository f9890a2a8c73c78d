"""What each tensor of the smaller checkpoint is made of: pure, nothing is read but names and shapes.

Units of any kinds are cut at once: experts leave with their weights and their rows of the router (2212.09811), heads
with their rows of query, key and value and their columns of the output (1905.10650), hidden units with their rows and
columns, layers with all that they hold, tokens with their rows of the embeddings, channels with their rows and columns
of all tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

from prunecli.architectures.records import Side
from prunecli.errors import UnsupportedModelError, UsageError, located
from prunecli.model.axes import Axis, Carrier, Kind, Rename, axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import Sizes, with_keys
from prunecli.model.depth import heirs, keeping_layers, renaming_of
from prunecli.model.find_axes import CHANNELS, axes_of
from prunecli.model.mixtures import experts_per_token
from prunecli.model.quantised import renamed_settings
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.model.structure import KeptUnits, Structure
from prunecli.selection.selection import Selection
from prunecli.tensors.stream import Copy, Output

Places = dict[str, tuple[Axis, tuple[int, ...]]]
"""Name of an axis that loses units -> the axis, and where those that stay lie among its units."""


def cut(source: Checkpoint, selection: Selection) -> Rewrite:
    """The checkpoint with only the units that `selection` keeps, its tensors in the order of the source.

    Units keep the order in which they are stored, and numbers in names count those that stay. What hangs below the name
    of an expert or layer goes with it, whatever it is, so that quantised weights are kept as they are.

    Raises:
        UsageError: no such axis or unit, fewer units than it needs, or a cast of quantised weights.
        UnsupportedModelError: the family is not declared, or no stock class holds the result and none but that runs it.
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
            ranges = carrier.ranges(own, shape[carrier.dim], held)
            shape[carrier.dim] = sum(stop - start for start, stop in ranges)
            new = new if ranges else None  # a tensor of no head at all is not stored
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
    return replace(
        rewrite, config=_renamed(source, config, places), files={**rewrite.files, **selection.files}
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
    parts = (*layout.ffns, *layout.attentions)
    names = {part.name: part.tensor_names for part in parts}
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


def _renamed(source: Checkpoint, config: Mapping[str, Any], places: Places) -> dict[str, Any]:
    """config.json, the experts and layers that its settings of a quantisation name under their new numbers.

    Raises:
        UnsupportedModelError: a number that is in no name of one of them: in a pattern, of many perhaps.
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
            loose = r"experts?\\?[._](?:expert_)?\d" if kind == "expert" else rf"{column}\\?\.[\[(\\]*\d"
            numbered[kind] = re.compile(loose)
    patterns.sort(key=lambda one: one[0])  # names of experts hold the number that their layer had
    modules = [
        f"{axis.module}.".removeprefix("model.") for axis, _ in places.values() if axis.kind == "expert"
    ]

    def rename(text: str) -> str | None:
        renamed, found = text, set()
        for kind, pattern, numbers in patterns:
            if match := pattern.search(renamed):
                new = numbers.get(int(match[1]))
                if new is None:
                    return None
                renamed = f"{renamed[: match.start(1)]}{new}{renamed[match.end(1) :]}"
                found.add(kind)
        for kind, loose in numbered.items():
            # Experts of other layers keep their numbers.
            is_other = (
                kind == "expert" and not text.startswith("re:") and not any(one in text for one in modules)
            )
            if kind not in found and not is_other and loose.search(text):
                raise UnsupportedModelError(
                    f'{source.path}: config.json: the quantisation settings name {kind}s by number: "{text}"',
                    "prunecli cannot say which of them are kept; write the names of single modules there.",
                )
        return renamed

    return renamed_settings(config, rename) if patterns else dict(config)
