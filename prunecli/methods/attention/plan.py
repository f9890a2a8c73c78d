"""From a checkpoint and options to a plan: which attentions are merged, which go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prunecli.architectures.records import Side
from prunecli.choices import Choices
from prunecli.errors import CheckpointError, UsageError
from prunecli.methods.attention.arrange import AttentionPlan, Request, arrange_attentions
from prunecli.methods.sharing import CONFIGURATIONS, Init, Order, Treatment, find_configuration
from prunecli.model.attention import KINDS, AttentionKind
from prunecli.model.history import given, history_step

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

COMMAND = "share-attention"
KNOWN = tuple(known for known in CONFIGURATIONS if not (known.across or known.match))
"""The paper's configurations, but for those in which encoder and decoder share, or FFNs get wider."""
NAMES = tuple(known.name for known in KNOWN)
DEFAULT_CONFIG = {"both": "SharedEncSharedDec", "encoder": "SharedEnc", "decoder": "SharedDec"}
"""Without options: all self-attention shared."""


@dataclass(frozen=True)
class AttentionOptions(Choices):
    """What `share-attention` is asked.

    Attributes:
        config: name of a configuration of self-attention; excludes `encoder` and `decoder`; with none of the four:
            DEFAULT_CONFIG.
        encoder: what happens to the encoder's self-attention.
        decoder: what happens to the decoder's.
        cross: what happens to cross-attention.
        groups: shared attentions of each kind; or of the encoder, and of the decoder and cross-attention; or of each
            of the three.
        order: which layers share one, where there are several.
        init: how a shared attention is made; None: the mean.
        dtype: type of the result; None: as stored.
    """

    config: str | None = None
    encoder: Treatment | None = None
    decoder: Treatment | None = None
    cross: Treatment | None = None
    groups: tuple[int, ...] | None = None
    order: Order | None = None
    init: Init | None = None
    dtype: str | None = None


def plan_attention(checkpoint: Checkpoint, options: AttentionOptions) -> AttentionPlan:
    """Choose what to merge and what to drop.

    Raises:
        UnsupportedModelError: the family is not declared.
        UsageError: options that contradict each other, or that this model cannot hold.
    """
    layers = checkpoint.layout.attentions
    if not layers:
        raise CheckpointError(f"{checkpoint.path}: config.json names no layers", "Copy the file again.")
    name, treatments = _treatments(options, {layer.stack.side for layer in layers})
    if "share" not in treatments.values():
        only_shared = {"--init": options.init, "--groups": options.groups, "--order": options.order}
        for option in given(only_shared):
            raise UsageError(f"{option} speaks of shared attentions, and none are shared.", "Leave it out.")
    groups: dict[AttentionKind, int] = {}
    if options.groups is not None:
        last = len(options.groups) - 1
        groups = {kind: options.groups[min(number, last)] for number, kind in enumerate(KINDS)}
    request = Request(treatments, groups, options.order or "sequence", options.init or "mean")
    plan = arrange_attentions(layers, request)
    merged = any(len(group.sources) > 1 for group in plan.groups)
    windows = {layer.window for layer in layers if treatments.get(layer.kind) == "share"}
    reasons = []
    if options.config is None and name is not None:
        reasons.append(f"No --config given: {name}.")
    if options.init is None and merged:
        reasons.append("No --init given: a shared attention is the mean of those that it stands for.")
    if len(windows) > 1:
        reasons.append(f"Layers share with layers of their own window alone ({', '.join(sorted(windows))}).")
    arguments = {
        "config": name,
        "encoder": None if name else treatments.get("encoder"),
        "decoder": None if name else treatments.get("decoder"),
        "cross": treatments.get("cross"),
        "groups": None if options.groups is None else list(options.groups),
        "order": options.order,
        "init": options.init,
        "dtype": options.dtype,
    }
    step = history_step(COMMAND, checkpoint, given(arguments))
    return replace(plan, dtype=options.dtype, step=step, reasons=tuple(reasons))


def _treatments(
    options: AttentionOptions, sides: set[Side]
) -> tuple[str | None, dict[AttentionKind, Treatment]]:
    """The name of the configuration, and what happens to each kind."""
    if options.config is not None and (options.encoder is not None or options.decoder is not None):
        raise UsageError("--config goes with neither --encoder nor --decoder.", "It says both already.")
    config = options.config
    if config is None and options.encoder is options.decoder is options.cross is None:
        config = DEFAULT_CONFIG["both" if len(sides) > 1 else next(iter(sides))]
    named = None if config is None else find_configuration(config, sides, KNOWN)
    asked = {
        "encoder": options.encoder if named is None else named.encoder,
        "decoder": options.decoder if named is None else named.decoder,
        "cross": options.cross,
    }
    treatments = {kind: treatment for kind in KINDS if (treatment := asked[kind]) is not None}
    return None if named is None else named.name, treatments
