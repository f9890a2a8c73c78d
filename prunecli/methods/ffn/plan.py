"""From a checkpoint and options to a plan: which FFNs are merged, which go, which hidden units stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from prunecli.architectures.records import Side
from prunecli.choices import Choices
from prunecli.errors import CheckpointError, UsageError
from prunecli.methods.ffn.arrange import MATCH, FfnPlan, Group, Request, arrange_ffn
from prunecli.methods.ffn.names import FfnInit, KeepUnits
from prunecli.methods.ffn.score import UnitActivations, best_units, ranked_units, unit_norms
from prunecli.methods.sharing import Order, Treatment, find_configuration
from prunecli.model.decision import Decision, Origin
from prunecli.model.ffn import FfnLayer
from prunecli.model.history import given, history_step

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

COMMAND = "share-ffn"
DEFAULT_CONFIG = {"both": "SharedEncNoDec", "encoder": "SharedEnc", "decoder": "SharedDec"}
"""Without options: what costs the paper's models least for what it saves."""

Activations = Callable[[FfnPlan], UnitActivations]
"""Measures hidden units in the model of a plan that narrows nothing."""


@dataclass(frozen=True)
class FfnOptions(Choices):
    """What `share-ffn` is asked.

    Attributes:
        config: name of a configuration; excludes `encoder` and `decoder`; with none of the three: DEFAULT_CONFIG.
        encoder: what happens to the encoder's FFNs.
        decoder: what happens to the decoder's.
        width: hidden units of a shared FFN, or `match`.
        init: how a shared FFN is made; see `Request`.
        scale: factor of a shared FFN's output; see `Request`.
        groups: shared FFNs of a side, or of encoder and decoder.
        order: which layers share one, where there are several.
        keep_units: which hidden units stay where an FFN gets narrower; None: none does, or `plan_ffn_on_text` chooses
            by activations.
        dense_only: leave mixtures of experts as they are.
        dtype: type of the result; None: as stored.
        seed: of new hidden units.
        text: what activations are measured on, for the history.
    """

    config: str | None = None
    encoder: Treatment | None = None
    decoder: Treatment | None = None
    width: int | Literal["match"] | None = None
    init: FfnInit | None = None
    scale: float | None = None
    groups: tuple[int, ...] | None = None
    order: Order | None = None
    keep_units: KeepUnits | None = None
    dense_only: bool = False
    dtype: str | None = None
    seed: int = 0
    text: Mapping[str, object] | None = None


def plan_ffn(checkpoint: Checkpoint, options: FfnOptions, activations: Activations | None = None) -> FfnPlan:
    """Choose what to merge and what to drop.

    Args:
        checkpoint: the source; its weights are read where hidden units are chosen by their norms.
        options: see there.
        activations: called where hidden units are chosen by their activations, with the plan of the merged FFNs before
            any of them gets narrower.

    Raises:
        UnsupportedModelError: the family is not declared, or mixtures of experts would have to be merged.
        UsageError: options that contradict each other, or that this model cannot hold.
        CheckpointError: the weights are damaged.
    """
    layers = {layer.name: layer for layer in checkpoint.layout.ffns}
    if not layers:
        raise CheckpointError(f"{checkpoint.path}: config.json names no layers", "Copy the file again.")
    name, request = _request(options, {layer.side for layer in layers.values()})
    plan = arrange_ffn(tuple(layers.values()), request)
    narrowed = {group.owner: group for group in plan.groups if group.width < group.init_width}
    measured = _scores(checkpoint, layers, plan, narrowed, options, activations)
    scores = measured.magnitudes
    units = {owner: best_units(scores[owner], group.width) for owner, group in narrowed.items()}
    decision = Decision(
        "unit",
        ranked_units(layers, narrowed, units, scores, measured.tokens),
        options.keep_units,
        "the highest of each FFN as --init makes it stay",
        origin=Origin.of_text(options.text),
    )
    return replace(
        plan,
        units=units,
        decision=decision if narrowed else None,
        dtype=options.dtype,
        seed=options.seed,
        step=history_step(COMMAND, checkpoint, given(_arguments(name, options, request))),
        reasons=_reasons(name, options, plan),
    )


def narrows(checkpoint: Checkpoint, options: FfnOptions) -> bool:
    """Whether an FFN gets narrower, so that some hidden units go.

    Raises:
        PruneError: as `plan_ffn`.
    """
    layers = checkpoint.layout.ffns
    plan = arrange_ffn(layers, _request(options, {layer.side for layer in layers})[1])
    return any(group.width < group.init_width for group in plan.groups)


def _request(options: FfnOptions, sides: set[Side]) -> tuple[str | None, Request]:
    """The name of the configuration, and what is asked for."""
    named = options.config
    if named is not None and (options.encoder is not None or options.decoder is not None):
        raise UsageError("--config goes with neither --encoder nor --decoder.", "It says both already.")
    if named is None and options.encoder is None and options.decoder is None:
        named = DEFAULT_CONFIG["both" if len(sides) > 1 else next(iter(sides))]
    request = Request(
        encoder=options.encoder or "keep",
        decoder=options.decoder or "keep",
        order=options.order or "sequence",
        width=options.width,
        init=options.init,
        scale=options.scale,
        dense_only=options.dense_only,
    )
    if named is not None:
        found = find_configuration(named, sides)
        width = options.width if options.width is not None or not found.match else MATCH
        request = replace(
            request, encoder=found.encoder, decoder=found.decoder, across=found.across, width=width
        )
        named = found.name
    if not request.shares:
        _refuse_unused(options)
    return named, replace(request, groups=_groups(options.groups, request))


def _refuse_unused(options: FfnOptions) -> None:
    """Options that only say something of shared FFNs."""
    given = {
        "--width": options.width,
        "--init": options.init,
        "--scale": options.scale,
        "--groups": options.groups,
        "--order": options.order,
        "--keep-units": options.keep_units,
    }
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} speaks of shared FFNs, and none are shared.", "Leave it out.")


def _groups(groups: tuple[int, ...] | None, request: Request) -> dict[Side, int]:
    if groups is None:
        return {}
    if len(groups) == 2 and request.across:
        raise UsageError("--groups: encoder and decoder share the same FFNs.", "Give one number.")
    return {"encoder": groups[0], "decoder": groups[-1]}


def _scores(
    checkpoint: Checkpoint,
    layers: Mapping[str, FfnLayer],
    plan: FfnPlan,
    narrowed: Mapping[str, Group],
    options: FfnOptions,
    activations: Activations | None,
) -> UnitActivations:
    """Of the groups that get narrower, by owner, `[init_width]`: what each hidden unit is worth."""
    if not narrowed:
        if options.keep_units is not None:
            raise UsageError(
                "--keep-units: no FFN gets narrower.", "Leave it out, or give a smaller --width."
            )
        return UnitActivations({})
    if options.keep_units != "norms":
        if activations is None:
            remedy = "Give --data or --text; or choose by the weights alone: --keep-units norms."
            raise UsageError("An FFN gets narrower: which hidden units stay is chosen by text.", remedy)
        whole = (replace(group, width=max(group.width, group.init_width)) for group in plan.groups)
        return activations(replace(plan, groups=tuple(whole)))
    checkpoint.check()
    norms = {owner: unit_norms(checkpoint, layers, group) for owner, group in narrowed.items()}
    return UnitActivations(norms)


def _arguments(name: str | None, options: FfnOptions, request: Request) -> dict[str, Any]:
    return {
        "config": name,
        "encoder": None if name else request.encoder,
        "decoder": None if name else request.decoder,
        "width": request.width,
        "init": options.init,
        "scale": options.scale,
        "groups": None if options.groups is None else list(options.groups),
        "order": options.order,
        "keep_units": options.keep_units,
        "text": None if options.text is None else dict(options.text),
        "dense_only": options.dense_only or None,
        "dtype": options.dtype,
        "seed": options.seed,
    }


def _reasons(name: str | None, options: FfnOptions, plan: FfnPlan) -> tuple[str, ...]:
    lines = []
    if options.config is None and name is not None:
        lines.append(f"No --config given: {name}.")
    inits = {group.init for group in plan.merged if len(group.sources) > 1}
    if options.init is None and "concat" in inits:
        lines.append("No --init given: a shared FFN is those that it stands for side by side (concat).")
    if options.init is None and "mean" in inits:
        lines.append("No --init given: a shared FFN is the mean of those that it stands for.")
    return tuple(lines)
