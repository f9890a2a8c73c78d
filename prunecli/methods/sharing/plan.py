"""From a checkpoint and options to a plan: which FFNs or attentions are merged, which go, which hidden units stay.

Sharing N FFNs of width d_ff saves (N - 1) x 2 x d_model x d_ff parameters, dropping them N x 2 x d_model x d_ff; what
biases and norms save comes on top (2309.01826, 2.2). A gated FFN has three matrices in the place of two. Sharing N
attentions saves (N - 1) x 4 x d_model^2, dropping them N x 4 x d_model^2; fewer where several query heads share a
key/value head.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.methods.sharing.options import (
    AttentionOptions,
    Configuration,
    FfnInit,
    FfnOptions,
    Order,
    SharingOptions,
    chosen_configuration,
)
from prunecli.methods.units import unit_norms
from prunecli.model.axes import Axis, axis_name, module_of
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Decision, Origin
from prunecli.model.history import given, history_step
from prunecli.model.parts import KIND_NAMES, KINDS, AttentionLayer, FfnLayer
from prunecli.model.rewrite import Rewrite, replacing, rewritten
from prunecli.model.structure import KeptUnits, Structure
from prunecli.results.unit_scores import Scores
from prunecli.selection.cut import decision_of
from prunecli.selection.select import best
from prunecli.tensors.stream import (
    Concat,
    Copy,
    Expression,
    Output,
    Sum,
    joined,
    noise,
    shape_of,
    zeros,
)

Layer = FfnLayer | AttentionLayer


@dataclass(frozen=True)
class Group:
    """Layers that run one FFN, or one attention, in the result.

    Attributes:
        members: names of the FFNs or attentions of these layers, in the order of the model; the first one holds the
            tensors.
        sources: names of the FFNs or attentions that are merged.
        init: how they are merged. If None, the tensors stay as they are.
        init_width: number of hidden units, or heads, after merging.
        width: number of hidden units, or heads, of the result: the best ones, or all and new ones.
        scale: factor of an FFN's output.
        units: hidden units to keep after merging, in order. If None, all.
    """

    members: tuple[str, ...]
    sources: tuple[str, ...]
    init: FfnInit | None
    init_width: int
    width: int
    scale: float = 1.0
    units: Sequence[int] | None = None

    @property
    def owner(self) -> str:
        """Name of the FFN or attention that holds the tensors."""
        return self.members[0]

    @property
    def is_merged(self) -> bool:
        """Whether its tensors are others than those of its one source."""
        return len(self.sources) > 1 or self.width != self.init_width or self.scale != 1


@dataclass(frozen=True)
class SharePlan:
    """Which FFNs, or which attentions, are merged and which go, and why.

    Attributes:
        options: the options of the command.
        layers: name -> FFN or attention of the source.
        groups: every dense FFN, or every attention, that the result stores, changed or not, in the order of the model.
        removed: names of the FFNs or attentions that the result lacks.
        sparse: names of the mixtures of experts, which do not change.
        step: the entry for `Structure.history`.
        reasons: lines about choices made by default.
        decision: the values that hidden units were chosen by, if any were chosen.
    """

    options: SharingOptions
    layers: Mapping[str, Any]
    groups: tuple[Group, ...]
    removed: tuple[str, ...]
    sparse: tuple[str, ...]
    step: Mapping[str, object] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    decision: Decision | None = None

    @property
    def narrowed(self) -> Mapping[str, Group]:
        """Owner -> group, of the FFNs that get narrower than their initialisation makes them."""
        return {group.owner: group for group in self.groups if group.width < group.init_width}


def arrange(
    layers: Sequence[Layer],
    options: SharingOptions,
    chosen: Configuration,
    shapes: Mapping[str, tuple[int, ...]],
) -> SharePlan:
    """Merge and drop as asked. Layers that share already count as one wherever they are merged.

    Attentions that see windows of different kinds never share, nor layers of other sizes: each has groups of its own.

    Args:
        layers: every FFN, or every attention, of the model.
        options: the options of the command.
        chosen: the treatment of each kind.
        shapes: of the tensors of the model.

    Raises:
        UnsupportedModelError: mixtures of experts on a side that is to be shared or dropped.
        UsageError: what this model cannot hold: a kind that it has not, groups that do not divide its layers, widths
            or numbers of heads that do not go together.
    """
    is_ffn = options.part == "FFN"
    sparse = [layer.name for layer in layers if isinstance(layer, FfnLayer) and layer.is_sparse]
    _check(layers, sparse, options, chosen)
    treated: dict[str, list[Any]] = {"share": [], "keep": [], "drop": []}
    for layer in layers:
        if layer.name not in sparse:
            treated["drop" if layer.removed else getattr(chosen, layer.kind)].append(layer)
    alike = defaultdict(list)
    for layer in treated["share"]:
        # Names of tensors, and their shapes but for the number of units.
        form = []
        for name in layer.tensor_names:
            suffix = name.removeprefix(layer.name)
            shape = [*shapes.get(layer.owner + suffix, ())]
            if shape and name in layer.carriers:
                shape[layer.carriers[name].dim] //= max(layer.count, 1)
            form.append((suffix, *shape))
        kind = "encoder" if chosen.across else layer.kind
        name = "" if is_ffn else layer.spec.name  # a layer may have two attentions
        alike[kind, getattr(layer, "window", ""), name, tuple(form)].append(layer)
    clusters: list[list[Any]] = []
    counts = options.groups or (1,)
    for (kind, window, *_), own in alike.items():
        words = "FFNs" if is_ffn else f"layers of {KIND_NAMES[kind]}" + (f" ({window})" if window else "")
        count = counts[min(KINDS.index(kind), len(counts) - 1)]
        numbers = group_numbers(len(own), count, options.order or "sequence", words)
        for group in range(count):
            clusters.append([layer for layer, number in zip(own, numbers, strict=True) if number == group])
    kept = [
        [layer for layer in treated["keep"] if layer.owner == owner]
        for owner in dict.fromkeys(layer.owner for layer in treated["keep"])
    ]
    first_of: dict[str, tuple[Any, list[Any]]] = {}
    for members in (*clusters, *kept):
        for layer in members:
            first, others = first_of.setdefault(layer.owner, (layer, members))
            if others is not members:
                ways = " (encoder and decoder: `preset=SharedEncDec`), or drop one side."
                raise UsageError(
                    f"{layer.name} and {first.name} share one {options.part} already and would be parted.",
                    f"Share them together{ways if is_ffn else ', or drop them.'}",
                )
    # With width "match" the shared FFNs also get the hidden units of dropped FFNs that no layer runs any more.
    dropped = {layer.owner: layer.count for layer in treated["drop"]}
    lost = sum(units for owner, units in dropped.items() if owner not in first_of)
    groups = [_group(members, options, lost // len(clusters)) for members in clusters]
    for members in kept:
        units = members[0].count
        groups.append(Group(_names(members), (members[0].owner,), None, units, units))
    place = [layer.name for layer in layers]
    return SharePlan(
        options,
        {layer.name: layer for layer in layers},
        tuple(sorted(groups, key=lambda group: place.index(group.owner))),
        removed=_names(treated["drop"]),
        sparse=tuple(sparse),
    )


def group_numbers(layers: int, groups: int, order: Order, what: str = "FFNs") -> list[int]:
    """The group of each of `layers` layers (Appendix A; Takase and Kiyono, 2104.06022).

    Of six layers in three groups: `sequence` 0 0 1 1 2 2, `cycle` 0 1 2 0 1 2, `cycle-reverse` 0 1 2 2 1 0; the last
    round of the latter is reversed, those before it are not.

    Args:
        what: they are, for messages.

    Raises:
        UsageError: the groups do not divide the layers.
    """
    if groups > layers or layers % groups:
        divisors = [str(number) for number in range(1, layers + 1) if layers % number == 0]
        reason = "more groups than layers" if groups > layers else "the groups would be of different sizes"
        raise UsageError(
            f"`groups={groups}`: {layers} {what} to share; {reason}.", f"Choose one of {', '.join(divisors)}."
        )
    if order == "sequence":
        return [layer // (layers // groups) for layer in range(layers)]
    numbers = [layer % groups for layer in range(layers)]
    return numbers if order == "cycle" else numbers[:-groups] + numbers[-groups:][::-1]


def _check(
    layers: Sequence[Layer],
    sparse: Sequence[str],
    options: SharingOptions,
    chosen: Configuration,
) -> None:
    """Refuse kinds of which the model has none to share or drop, and widths and scales that cannot be."""
    for kind in KINDS:
        treatment = getattr(chosen, kind)
        if treatment == "keep":
            continue
        own = [layer for layer in layers if layer.kind == kind]
        if not own:
            what = kind if options.part == "FFN" else KIND_NAMES[kind]
            raise UsageError(f"`{kind}={treatment}`: the model has no {what}.", "Leave it out.")
        dense = [layer for layer in own if layer.name not in sparse]
        if options.part == "FFN" and not any(layer.stack.ffn.tensors for layer in own):
            raise UsageError(f"`{kind}={treatment}`: no FFN was found in the {kind}.", "Leave it out.")
        if len(dense) < len(own) and not (options.dense_only and dense):
            remedy = f"Add `dense_only` to {treatment} the other {len(dense)} and leave these."
            alone = "An FFN can only be shared or dropped where it is dense; see prunecli prune-experts."
            raise UnsupportedModelError(
                f"{len(own) - len(dense)} of the {len(own)} FFNs of the {kind} are mixtures of experts.",
                remedy if dense else alone,
            )
        if treatment == "share" and all(layer.removed for layer in dense):
            what = f"the {kind} has no FFN"
            if options.part == "attention":
                what = f"the model has no {KIND_NAMES[kind]}"
            raise UsageError(f"`{kind}=share`: {what} left to share.", f"Use `{kind}=keep`.")
    if options.scale == 0:
        raise UsageError("`scale=0`: the output would be lost.", "Give a factor such as 1 or 0.5.")


def _group(members: Sequence[Any], options: SharingOptions, lost: int) -> Group:
    """The FFN or attention that `members` share; `lost`: hidden units of dropped FFNs that it also stands for."""
    units_of = {layer.owner: layer.count for layer in members}
    counts = sorted(set(units_of.values()))
    listed = ", ".join(map(str, counts))
    width = sum(units_of.values()) + lost if options.width == "match" else options.width
    wider: FfnInit = "mean" if width is None or width <= counts[-1] else "concat"
    init = options.init or wider
    if options.part == "attention":
        both = f"{members[0].name} and those that would share it hold different"
        if len(counts) > 1:
            raise UsageError(
                f"{both} numbers of heads ({listed}).",
                "Share first and prune heads then, or choose groups of equal numbers.",
            )
        if init == "mean" and members[0].spec.position_bias and len({layer.heads for layer in members}) > 1:
            raise UsageError(
                f"{both} heads, each with positions of its own: no mean of them.",
                "Choose `init=first` or `init=last`.",
            )
    elif init == "mean" and len(counts) > 1:
        raise UsageError(
            f"The FFNs to share have different widths ({listed}): no mean of them.",
            "Choose `init=first`, `init=last` or `init=concat`.",
        )
    sources = tuple(units_of)
    if init in ("first", "last"):
        sources = sources[:1] if init == "first" else sources[-1:]
    scale = options.scale
    if scale is None:
        scale = 1 / len(sources) if init == "concat" else 1.0
    made = sum(units_of.values()) if init == "concat" else units_of[sources[0]]
    return Group(_names(members), sources, init, made, made if width is None else width, scale)


def _names(layers: Sequence[Layer]) -> tuple[str, ...]:
    return tuple(layer.name for layer in layers)


def plan_attention(checkpoint: Checkpoint, options: AttentionOptions) -> SharePlan:
    """Choose which attentions to merge and which to drop.

    Raises:
        UnsupportedModelError: its class says nothing.
        UsageError: options that contradict each other, or that this model cannot hold.
    """
    return arranged(checkpoint, options)


def plan_ffn(
    checkpoint: Checkpoint, options: FfnOptions, activations: Callable[[SharePlan], Scores] | None = None
) -> SharePlan:
    """Choose which FFNs to merge and which to drop.

    Args:
        checkpoint: the source; its weights are read where hidden units are chosen by their norms.
        options: see there.
        activations: measures hidden units where they are chosen by their activations, with the plan of the merged FFNs
            before any of them gets narrower.

    Raises:
        UnsupportedModelError: its class says nothing, or mixtures of experts would have to be merged.
        UsageError: options that contradict each other, or that this model cannot hold.
        CheckpointError: the weights are damaged.
    """
    plan = arranged(checkpoint, options)
    layers, narrowed = plan.layers, plan.narrowed
    if not narrowed:
        if options.keep_units is not None:
            raise UsageError(
                "`keep_units`: no FFN gets narrower.", "Leave it out, or give a smaller `width`."
            )
        return plan
    tokens = {}
    if options.keep_units == "norms":
        checkpoint.check()
        worth = {}  # of the FFNs that `init` makes
        for owner, group in narrowed.items():
            carriers = layers[owner].carriers
            matrices = {name: carrier for name, carrier in carriers.items() if name.endswith("weight")}
            made = partial(ffn_tensor, checkpoint, layers, replace(group, width=group.init_width))
            worth[axis_name(owner, "unit")] = unit_norms(checkpoint, matrices, group.init_width, made)
    elif activations is None:
        remedy = "Give `data` or `files`; or choose by the weights alone: `keep_units=norms`."
        raise UsageError("An FFN gets narrower: which hidden units are kept is chosen by text.", remedy)
    else:
        whole = tuple(replace(group, width=max(group.width, group.init_width)) for group in plan.groups)
        measured = activations(replace(plan, groups=whole))
        worth, tokens = measured.importance(), measured.tokens
    axes, kept = [], {}
    for owner, group in narrowed.items():
        ids, layer = tuple(range(group.init_width)), layers[owner]
        axis = Axis(axis_name(owner, "unit"), "unit", ids, group.init_width, layer.side, layer.layer)
        axes.append(axis)
        kept[axis.name] = best(axis, worth[axis.name], group.width)
    decision = decision_of(
        axes,
        kept,
        worth,
        tokens=tokens,
        metric=options.keep_units,
        how="the highest of each FFN as init makes it are kept",
        origin=Origin.of_text(options.text),
    )
    groups = (replace(group, units=kept.get(axis_name(group.owner, "unit"))) for group in plan.groups)
    return replace(plan, groups=tuple(groups), decision=decision)


def arranged(checkpoint: Checkpoint, options: SharingOptions) -> SharePlan:
    """The plan, but for the hidden units that stay."""
    layout = checkpoint.layout
    layers = layout.ffns if options.part == "FFN" else layout.attentions
    if not layers:
        raise UnsupportedModelError(
            f"{checkpoint.path}: the model has no {options.part} that can be shared or removed"
        )
    sides = {layer.side for layer in layers}
    chosen = chosen_configuration(options, sides)
    arguments = {**options.recorded(), "preset": chosen.name or None, "text": options.text}
    if isinstance(options, FfnOptions):
        if chosen.match and options.width is None:
            options = options.updated(width="match")
        arguments |= {side: None if chosen.name else getattr(chosen, side) for side in sorted(sides)}
        arguments |= {"width": options.width, "seed": options.seed}
    plan = arrange(layers, options, chosen, layout.shapes)
    reasons = []
    if options.preset is None and chosen.name:
        reasons.append(f"No `preset` given: {chosen.name}.")
    inits = {group.init for group in plan.groups if len(group.sources) > 1}
    if options.init is None and "concat" in inits:
        reasons.append(
            "No `init` given: a shared FFN is made of those that it replaces side by side (concat)."
        )
    if options.init is None and "mean" in inits:
        reasons.append(f"No `init` given: a shared {options.part} is the mean of those that it replaces.")
    windows = {getattr(layer, "window", "") for layer in layers if getattr(chosen, layer.kind) == "share"}
    if len(windows) > 1:
        reasons.append(f"Layers share with layers of their own window alone ({', '.join(sorted(windows))}).")
    step = history_step(f"share-{options.part.lower()}", checkpoint, given(arguments))
    return replace(plan, step=step, reasons=tuple(reasons))


def rewrite_shared(checkpoint: Checkpoint, plan: SharePlan) -> Rewrite:
    """The checkpoint with its FFNs or attentions as planned, its tensors in the order of the source.

    What stays as it is, is copied. What is removed goes with its norms and, where no layer is left that uses it, an
    attention's table of positions; each layer that shares keeps its own norms.

    Raises:
        CheckpointError: tensors that config.json does not ask for, or lack of some.
        UnsupportedModelError: its class says nothing.
    """
    checkpoint.check()
    layers, is_ffn = plan.layers, plan.options.part == "FFN"
    own = {name: layer.tensor_names for name, layer in layers.items()}
    made = defaultdict(list)
    for group in plan.groups:
        for name, *sources in zip(own[group.owner], *(own[name] for name in group.sources), strict=True):
            if is_ffn:
                expression = ffn_tensor(checkpoint, layers, group, name, plan.options.seed)
            elif sources[0] in checkpoint.tensors:
                expression = weighted_sum([Copy(source) for source in sources], 1 / len(sources))
            else:  # config.json does not ask for this tensor, or no head is left
                continue
            dtype = checkpoint.info(sources[0]).dtype
            made[sources[0]].append(Output(name, dtype, shape_of(checkpoint, expression), expression))
    gone = {name for names in own.values() for name in names}
    structure = _structure(checkpoint, plan)
    result = checkpoint.layout.changed(structure)  # it says which norms go with what is removed
    for layer in (*result.ffns, *result.attentions):
        if layer.name in plan.removed:
            gone.update(layer.norm_tensors, layer.stock_tensors)
    outputs = replacing(checkpoint, {**dict.fromkeys(gone, ()), **made})
    return rewritten(checkpoint, structure, outputs, plan.step, plan.decision, plan.options.dtype)


def _structure(checkpoint: Checkpoint, plan: SharePlan) -> Structure:
    """The source's structure with what the plan shares, removes and resizes."""
    structure, layers = checkpoint.structure, plan.layers
    shared = {name: group.owner for group in plan.groups for name in group.members[1:]}
    widths, axes = {}, dict(structure.axes)
    for name in layers:  # heads of a shared attention are its owner's
        axes.pop(axis_name(name, "head"), None)
    for group in plan.groups:
        layer = layers[group.owner]
        if plan.options.part == "FFN":
            if group.width != layer.stated:
                widths[group.owner] = group.width
            continue
        axis, held = axis_name(group.owner, "head"), layers[group.sources[0]].heads
        if axis in structure.axes or held != tuple(range(layer.stated)):
            axes[axis] = KeptUnits(held, layer.original_heads)
    return replace(structure.changing(layers, shared, plan.removed, widths), axes=axes)


def ffn_tensor(
    checkpoint: Checkpoint,
    layers: Mapping[str, FfnLayer],
    group: Group,
    name: str,
    seed: int = 0,
) -> Expression:
    """One tensor of a group's FFN, new hidden units and all; a copy where the FFN stays as it is.

    An FFN is FFN(x) = act(x W1 + b1) W2 + b2 (eq. 1), a gated one (act(x W1) * x V) W2. With k FFNs side by side in
    one of k x d_ff hidden units, W1 stacked, W2 joined and b2 added up, the sum of their outputs is exact.

    New hidden units have small random inputs (of the standard deviation that the model's weights are drawn with at its
    making) and outputs of zero: what is computed stays the same, and the first step of training moves them.

    Args:
        checkpoint: the source.
        layers: all of its FFNs by name.
        group: the group of the FFN.
        name: full name of the tensor.
        seed: seed of new hidden units.
    """
    names = [source + name.removeprefix(group.owner) for source in group.sources]
    if not group.is_merged:
        return Copy(names[0])
    member = layers[group.owner]
    is_last, carrier = module_of(name) == member.output, member.carriers.get(name)
    weight = group.scale if is_last else 1.0
    if group.init != "concat":
        weight /= len(names)
    if carrier is None:  # the bias of the output
        return weighted_sum([Copy(own) for own in names], weight)
    axis, blocks = carrier.dim, len(carrier.blocks)
    parts: list[Expression] = []
    kept = range(group.init_width) if group.units is None else {*group.units}
    for block in range(blocks):  # of a fused tensor, which holds the hidden units several times
        held: list[Expression] = []
        before = 0
        for source in names:
            width = checkpoint.info(source).shape[axis] // blocks
            own = [unit for unit in range(width) if before + unit in kept]
            places = joined((block * width + unit, block * width + unit + 1) for unit in own)
            if own:
                held.append(Copy(source, ((axis, tuple(places)),)))
            if group.init == "concat":
                before += width
        together = [[part] for part in held] if group.init == "concat" else [held]
        parts += [weighted_sum(summed, weight) for summed in together]
        if group.width > group.init_width:
            shape = list(shape_of(checkpoint, parts[-1]))
            shape[axis] = group.width - group.init_width
            if is_last or len(shape) == 1:
                parts.append(zeros(tuple(shape)))
            else:
                own_seed = f"{seed}:{name}:{block}" if block else f"{seed}:{name}"
                number = int.from_bytes(hashlib.sha256(own_seed.encode()).digest()[:8], "little")
                config = checkpoint.config
                drawn: Any = config.get("initializer_range", config.get("init_std"))
                is_known = isinstance(drawn, (int, float)) and 0 < drawn < 1
                parts.append(noise(tuple(shape), float(drawn) if is_known else 0.02, number))
    return parts[0] if len(parts) == 1 else Concat(axis, tuple(parts))


def weighted_sum(parts: Sequence[Expression], weight: float) -> Expression:
    """`weight` times the sum; one part by 1 is itself."""
    return parts[0] if len(parts) == 1 and weight == 1 else Sum(tuple(parts), weight)
