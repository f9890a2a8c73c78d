"""Which FFNs or attentions are merged, which go, and how wide merged FFNs are (2309.01826, 2.2): pure functions.

Sharing N FFNs of width d_ff saves (N - 1) x 2 x d_model x d_ff parameters, dropping them N x 2 x d_model x d_ff; what
biases and norms save comes on top. A gated FFN has three matrices in the place of two. Sharing N attentions saves
(N - 1) x 4 x d_model^2, dropping them N x 4 x d_model^2; fewer where several query heads share a key/value head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.methods.sharing.options import Configuration, FfnInit, Order, SharingOptions
from prunecli.model.decision import Decision
from prunecli.model.parts import KIND_NAMES, KINDS, AttentionKind, AttentionLayer, FfnLayer

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
    """

    members: tuple[str, ...]
    sources: tuple[str, ...]
    init: FfnInit | None
    init_width: int
    width: int
    scale: float = 1.0

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
        part: "FFN" or "attention".
        layers: name -> FFN or attention of the source.
        groups: every dense FFN, or every attention, that the result stores, changed or not, in the order of the model.
        removed: names of the FFNs or attentions that the result lacks.
        sparse: names of the mixtures of experts, which do not change.
        dtype: type of the result's floating-point tensors (`float16`, `F16`, …). If None, as stored.
        seed: seed of new hidden units.
        units: owner of a group that gets narrower -> the hidden units to keep after merging, in order.
        step: the entry for `Structure.history`.
        reasons: lines about choices made by default.
        decision: the values that hidden units were chosen by, if any were chosen.
    """

    part: str
    layers: Mapping[str, Layer]
    groups: tuple[Group, ...]
    removed: tuple[str, ...]
    sparse: tuple[str, ...]
    dtype: str | None
    seed: int
    units: Mapping[str, Sequence[int]] = field(default_factory=dict)
    step: Mapping[str, object] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    decision: Decision | None = None

    @property
    def narrowed(self) -> Mapping[str, Group]:
        """Owner -> group, of the FFNs that get narrower than their initialisation makes them."""
        return {group.owner: group for group in self.groups if group.width < group.init_width}


def _form(layer: Layer, shapes: Mapping[str, tuple[int, ...]]) -> object:
    """The names of the tensors of an FFN or attention, and their shapes but for the number of its units."""
    form = []
    for name in layer.tensor_names:
        suffix = name.removeprefix(layer.name)
        shape = [*shapes.get(layer.owner + suffix, ())]
        if shape and name in layer.carriers:
            shape[layer.carriers[name].dim] //= max(layer.count, 1)
        form.append((suffix, *shape))
    return tuple(form)


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
    alike: dict[tuple[AttentionKind, str, object], list[Any]] = defaultdict(list)
    for layer in treated["share"]:
        kind: AttentionKind = "encoder" if chosen.across else layer.kind
        alike[kind, getattr(layer, "window", ""), _form(layer, shapes)].append(layer)
    clusters: list[list[Any]] = []
    counts = options.groups or (1,)
    for (kind, window, _), own in alike.items():
        words = "FFNs" if is_ffn else f"layers of {KIND_NAMES[kind]}" + (f" ({window})" if window else "")
        count = counts[min(KINDS.index(kind), len(counts) - 1)]
        numbers = group_numbers(len(own), count, options.order or "sequence", words)
        for group in range(count):
            clusters.append([layer for layer, number in zip(own, numbers, strict=True) if number == group])
    shared = len(clusters)
    for owner in dict.fromkeys(layer.owner for layer in treated["keep"]):
        clusters.append([layer for layer in treated["keep"] if layer.owner == owner])
    first_of: dict[str, tuple[Any, list[Any]]] = {}
    for members in clusters:
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
    groups = [_group(members, options, lost // shared) for members in clusters[:shared]]
    for members in clusters[shared:]:
        units = members[0].count
        groups.append(Group(_names(members), (members[0].owner,), None, units, units))
    place = [layer.name for layer in layers]
    return SharePlan(
        options.part,
        {layer.name: layer for layer in layers},
        tuple(sorted(groups, key=lambda group: place.index(group.owner))),
        removed=_names(treated["drop"]),
        sparse=tuple(sparse),
        dtype=options.dtype,
        seed=options.seed,
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
    if not 0 < groups <= layers or layers % groups:
        divisors = [str(number) for number in range(1, layers + 1) if layers % number == 0]
        reason = "more groups than layers" if groups > layers else "the groups would be of different sizes"
        reason = "that is no number of groups" if groups < 1 else reason
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
    if options.scale is not None and not 0 < abs(options.scale) < inf:
        raise UsageError(
            f"`scale={options.scale:g}`: the output would be lost.", "Give a factor such as 1 or 0.5."
        )


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
        heads = {layer.heads for layer in members}
        if init == "mean" and members[0].spec.position_bias and len(heads) > 1:
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
