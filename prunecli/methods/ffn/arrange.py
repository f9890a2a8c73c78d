"""Which FFNs are merged, which go, and how wide the merged ones are (2309.01826, 2.2): pure functions.

Sharing N FFNs of width d_ff saves (N - 1) x 2 x d_model x d_ff parameters, dropping them N x 2 x d_model x d_ff; what
biases and norms save comes on top. A gated FFN has three matrices in the place of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from prunecli.architectures.records import Side
from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.methods.ffn.names import FfnInit
from prunecli.methods.sharing import SIDES, Order, Treatment, in_groups, owners, refuse_parting
from prunecli.model.decision import Decision
from prunecli.model.ffn import FfnLayer

MATCH: Literal["match"] = "match"
"""The width at which the shared FFNs have as many hidden units as all that they stand for."""


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        encoder: what happens to the encoder's FFNs.
        decoder: what happens to the decoder's.
        across: whether encoder and decoder share theirs with each other.
        groups: shared FFNs per side; of both together where they share across.
        order: which layers share one, where there are several (Appendix A).
        width: hidden units of a shared FFN; None: as the initialisation makes it.
        init: how a shared FFN is made of those that it stands for; None: `concat` where it shall be wider than each
            of them, else `mean`.
        scale: factor of its output; None: 1, of a concatenation of k: 1/k, so that it computes their mean.
        dense_only: whether mixtures of experts are left as they are; else they are refused.
    """

    encoder: Treatment = "keep"
    decoder: Treatment = "keep"
    across: bool = False
    groups: Mapping[Side, int] | None = None
    order: Order = "sequence"
    width: int | Literal["match"] | None = None
    init: FfnInit | None = None
    scale: float | None = None
    dense_only: bool = False

    def treatment(self, side: Side) -> Treatment:
        """Of the FFNs of this side."""
        return self.encoder if side == "encoder" else self.decoder

    @property
    def shares(self) -> bool:
        """Whether any are shared."""
        return "share" in (self.encoder, self.decoder)


@dataclass(frozen=True)
class Group:
    """Layers that run one FFN in the result.

    Attributes:
        members: names of their FFNs, in the order of the model; the first holds the tensors.
        sources: names of the FFNs whose tensors it is made of.
        init: how; None: it stays as it is.
        init_width: hidden units that this makes.
        width: hidden units of the result: the best of them, or these and new ones.
        scale: factor of the output.
    """

    members: tuple[str, ...]
    sources: tuple[str, ...]
    init: FfnInit | None
    init_width: int
    width: int
    scale: float = 1.0

    @property
    def owner(self) -> str:
        """The one that holds the tensors."""
        return self.members[0]

    @property
    def is_merged(self) -> bool:
        """Whether its tensors are others than those of its one source."""
        return len(self.sources) > 1 or self.width != self.init_width or self.scale != 1


@dataclass(frozen=True)
class FfnPlan:
    """Which FFNs are merged and which go, and why.

    Attributes:
        groups: every dense FFN that the result stores, those that stay as they are among them, in the order of the
            model.
        removed: names of the FFNs that the result has not.
        sparse: names of the mixtures of experts, which stay as they are.
        units: owner of a group that gets narrower than its initialisation -> which of the hidden units that this
            makes stay, in order.
        dtype: type of the result's floating-point tensors (`float16`, `F16`, …); None: as stored.
        seed: of new hidden units.
        step: the entry for `Structure.history`.
        reasons: plain lines that say what was chosen for the user.
        decision: by what hidden units were chosen; None: none were.
    """

    groups: tuple[Group, ...]
    removed: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    units: Mapping[str, Sequence[int]] = field(default_factory=dict)
    dtype: str | None = None
    seed: int = 0
    step: Mapping[str, object] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    decision: Decision | None = None

    @property
    def merged(self) -> tuple[Group, ...]:
        """The groups whose tensors are not plain copies."""
        return tuple(group for group in self.groups if group.is_merged)


def arrange_ffn(layers: Sequence[FfnLayer], request: Request) -> FfnPlan:
    """Merge and drop as asked. Layers that share an FFN already count as one FFN wherever FFNs are merged.

    Raises:
        UnsupportedModelError: mixtures of experts on a side that is to be shared or dropped.
        UsageError: what this model cannot hold: a side that it has not, groups that do not divide its layers, widths
            that do not go together.
    """
    _check_sides(layers, request)
    dense = [layer for layer in layers if not layer.is_sparse]
    held = {layer.name: layer for layer in dense if not layer.removed}
    dropped = [layer for layer in held.values() if request.treatment(layer.side) == "drop"]
    kept = [layer for layer in held.values() if request.treatment(layer.side) == "keep"]
    clusters = [
        *((members, True) for members in _shared(list(held.values()), request)),
        *((tuple(layer for layer in kept if layer.owner == owner), False) for owner in owners(kept)),
    ]
    refuse_parting(
        [members for members, _ in clusters],
        "FFN",
        "Share them together (encoder and decoder: --config SharedEncDec), or drop one side.",
    )
    used = {layer.owner for members, _ in clusters for layer in members}
    lost = sum({layer.owner: layer.width for layer in dropped if layer.owner not in used}.values())
    count = sum(is_shared for _, is_shared in clusters)
    groups = [
        _group(members, request, lost // count) if is_shared else _kept(members)
        for members, is_shared in clusters
    ]
    place = {layer.name: number for number, layer in enumerate(layers)}
    return FfnPlan(
        groups=tuple(sorted(groups, key=lambda group: place[group.owner])),
        removed=tuple(layer.name for layer in dense if layer.removed or layer in dropped),
        sparse=tuple(layer.name for layer in layers if layer.is_sparse),
    )


def _check_sides(layers: Sequence[FfnLayer], request: Request) -> None:
    sides = {layer.side for layer in layers}
    if request.across and sides != set(SIDES):
        raise UsageError("One FFN for encoder and decoder needs both.", f"The model has only {sides.pop()}s.")
    for side in SIDES:
        if request.treatment(side) == "keep":
            continue
        own = [layer for layer in layers if layer.side == side]
        if not own:
            raise UsageError(f"--{side} {request.treatment(side)}: the model has no {side}.", "Leave it out.")
        dense = [layer for layer in own if not layer.is_sparse]
        if len(dense) < len(own) and not (request.dense_only and dense):
            remedy = (
                f"Add --dense-only to {request.treatment(side)} the other {len(dense)} and leave these."
                if dense
                else "An FFN can only be shared or dropped where it is dense; see prunecli prune-experts."
            )
            raise UnsupportedModelError(
                f"{len(own) - len(dense)} of the {len(own)} FFNs of the {side} are mixtures of experts.",
                remedy,
            )
        if request.treatment(side) == "share" and all(layer.removed for layer in dense):
            raise UsageError(f"--{side} share: the {side} has no FFN left to share.", f"Use --{side} keep.")
    if request.scale is not None and not 0 < abs(request.scale) < inf:
        raise UsageError(
            f"--scale {request.scale:g}: the output would be lost.", "Give a factor such as 1 or 0.5."
        )
    if request.width == 0:
        raise UsageError(
            "--width 0: an FFN of no width is none.", "To remove FFNs: --encoder drop, --decoder drop."
        )
    if isinstance(request.width, int) and request.width < 0:
        raise UsageError(f"--width {request.width}: not a width.", "Give a number of hidden units, or match.")


def _shared(held: Sequence[FfnLayer], request: Request) -> list[tuple[FfnLayer, ...]]:
    """The layers that shall share an FFN with each other."""
    own = {side: [layer for layer in held if layer.side == side] for side in SIDES}
    found: list[tuple[FfnLayer, ...]] = []
    groups = request.groups or {}
    if request.across:
        own = {"encoder": [*own["encoder"], *own["decoder"]], "decoder": []}
    for side in SIDES:
        if request.treatment(side) == "share" and own[side]:
            found += in_groups(own[side], groups.get(side, 1), request.order)
    return found


def _group(members: Sequence[FfnLayer], request: Request, lost: int) -> Group:
    """The shared FFN of `members`; `lost`: hidden units of dropped FFNs that it also stands for."""
    width_of = {layer.owner: layer.width for layer in members}
    sources, widths = tuple(width_of), tuple(width_of.values())
    wanted = sum(widths) + lost if request.width == MATCH else request.width
    init = request.init or ("mean" if wanted is None or wanted <= max(widths) else "concat")
    if init == "mean" and len(set(widths)) > 1:
        raise UsageError(
            f"The FFNs to share have different widths ({', '.join(map(str, sorted(set(widths))))}): no mean of them.",
            "Choose --init first, last or concat.",
        )
    if init in ("first", "last"):
        sources = sources[:1] if init == "first" else sources[-1:]
    made = sum(width_of[name] for name in sources) if init == "concat" else width_of[sources[0]]
    scale = request.scale if request.scale is not None else 1 / len(sources) if init == "concat" else 1.0
    return Group(
        tuple(layer.name for layer in members),
        sources,
        init,
        made,
        made if wanted is None else wanted,
        scale,
    )


def _kept(members: Sequence[FfnLayer]) -> Group:
    width = members[0].width
    return Group(tuple(layer.name for layer in members), (members[0].owner,), None, width, width)
