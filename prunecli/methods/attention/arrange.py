"""Which attentions are merged, and which go (2309.01826, appendix B): pure functions.

Sharing N attentions saves (N - 1) x 4 x d_model^2 parameters, dropping them N x 4 x d_model^2; fewer where several
query heads share a key/value head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prunecli.errors import UsageError
from prunecli.methods.sharing import Init, Order, Treatment, in_groups, owners, refuse_parting
from prunecli.model.attention import KIND_NAMES, KINDS, AttentionKind, AttentionLayer


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        treatments: kind of attention -> what happens to it; one that is left out stays as it is.
        groups: kind -> shared attentions of it; 1 where it is left out.
        order: which layers share one, where there are several (appendix A).
        init: how a shared attention is made of those that it stands for.
    """

    treatments: Mapping[AttentionKind, Treatment] = field(default_factory=dict)
    groups: Mapping[AttentionKind, int] = field(default_factory=dict)
    order: Order = "sequence"
    init: Init = "mean"


@dataclass(frozen=True)
class AttentionGroup:
    """Layers that run one attention in the result.

    Attributes:
        members: names of their attentions, in the order of the model; the first holds the tensors.
        sources: names of the attentions whose tensors it is made of.
        init: how; None: it stays as it is.
        heads: original ids of its heads.
    """

    members: tuple[str, ...]
    sources: tuple[str, ...]
    init: Init | None
    heads: tuple[int, ...]

    @property
    def owner(self) -> str:
        """The one that holds the tensors."""
        return self.members[0]


@dataclass(frozen=True)
class AttentionPlan:
    """Which attentions are merged and which go, and why.

    Attributes:
        groups: every attention that the result stores, those that stay as they are among them, in the order of the
            model.
        removed: names of the attentions that the result has not.
        dtype: type of the result's floating-point tensors (`float16`, `F16`, …); None: as stored.
        step: the entry for `Structure.history`.
        reasons: plain lines that say what was chosen for the user.
    """

    groups: tuple[AttentionGroup, ...]
    removed: tuple[str, ...] = ()
    dtype: str | None = None
    step: Mapping[str, object] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


def arrange_attentions(layers: Sequence[AttentionLayer], request: Request) -> AttentionPlan:
    """Merge and drop as asked. Layers that share an attention already count as one wherever attentions are merged.

    Layers of one kind that see windows of different kinds never share: each kind of window has groups of its own.

    Raises:
        UsageError: what this model cannot hold: attentions that it has not, groups that do not divide the layers,
            numbers of heads that do not go together.
    """
    groups: list[AttentionGroup] = []
    removed: list[str] = []
    for kind in KINDS:
        own = [layer for layer in layers if layer.kind == kind]
        treatment = request.treatments.get(kind, "keep")
        present = [layer for layer in own if not layer.removed]
        if treatment != "keep" and not own:
            raise UsageError(f"--{kind} {treatment}: the model has no {KIND_NAMES[kind]}.", "Leave it out.")
        if treatment == "share" and not present:
            raise UsageError(
                f"--{kind} share: the model has no {KIND_NAMES[kind]} left to share.", f"Use --{kind} keep."
            )
        removed += [layer.name for layer in own if layer.removed or treatment == "drop"]
        if treatment == "share":
            groups += _shared(kind, present, request)
        elif treatment == "keep":
            for owner in owners(present):
                members = [layer for layer in present if layer.owner == owner]
                names = tuple(layer.name for layer in members)
                groups.append(AttentionGroup(names, (owner,), None, members[0].heads))
    return AttentionPlan(tuple(groups), tuple(removed))


def _shared(kind: AttentionKind, layers: Sequence[AttentionLayer], request: Request) -> list[AttentionGroup]:
    """The groups of the layers of one kind, in the order of the model."""
    clusters = [
        members
        for window in dict.fromkeys(layer.window for layer in layers)
        for members in in_groups(
            [layer for layer in layers if layer.window == window],
            request.groups.get(kind, 1),
            request.order,
            f"layers of {KIND_NAMES[kind]}" + (f" ({window})" if window else ""),
        )
    ]
    refuse_parting(clusters, "attention", "Share them together, or drop them.")
    first = {layer.name: number for number, layer in enumerate(layers)}
    groups = [_group(members, request.init) for members in clusters]
    return sorted(groups, key=lambda group: first[group.owner])


def _group(members: Sequence[AttentionLayer], init: Init) -> AttentionGroup:
    heads = {layer.owner: layer.heads for layer in members}
    numbers = sorted(set(map(len, heads.values())))
    if len(numbers) > 1:
        raise UsageError(
            f"{members[0].name} and those that would share it hold different numbers of heads "
            f"({', '.join(map(str, numbers))}).",
            "Share first and prune heads then, or choose groups of equal numbers.",
        )
    if init == "mean" and members[0].spec.position_bias and len(set(heads.values())) > 1:
        raise UsageError(
            f"{members[0].name} and those that would share it hold different heads, each with positions of its own: "
            "no mean of them.",
            "Choose --init first or last.",
        )
    sources = tuple(heads)
    if init != "mean":
        sources = sources[:1] if init == "first" else sources[-1:]
    return AttentionGroup(tuple(layer.name for layer in members), sources, init, heads[sources[0]])
