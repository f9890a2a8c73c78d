"""Options of `share-ffn` and `share-attention`, and the configurations of 2309.01826, Table 1, by the paper's names.

A configuration says what happens to the FFNs, or (appendix B) the attentions, of the encoder and of the decoder.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from prunecli.architectures.records import Side
from prunecli.choices import Choices
from prunecli.errors import UsageError

Treatment = Literal["share", "keep", "drop"]
Order = Literal["sequence", "cycle", "cycle-reverse"]
Init = Literal["mean", "first", "last"]
"""How one attention is made of several."""
FfnInit = Literal[Init, "concat"]
"""How one FFN is made of several."""
KeepUnits = Literal["norms", "activations"]
"""Which hidden units stay where a shared FFN gets narrower."""


@dataclass(frozen=True)
class Configuration:
    """Treatment of each kind of FFN or attention: one row of the table.

    Attributes:
        name: name in the paper; "" for treatments that the user gave one by one.
        encoder: treatment of the encoder's FFNs or self-attention.
        decoder: treatment of the decoder's.
        cross: treatment of cross-attention.
        across: whether encoder and decoder share one FFN, instead of one each.
        match: whether the shared FFN is as wide as all that it stands for together.
    """

    name: str
    encoder: Treatment = "keep"
    decoder: Treatment = "keep"
    cross: Treatment = "keep"
    across: bool = False
    match: bool = False


CONFIGURATIONS = (
    Configuration("SharedEnc", encoder="share"),
    Configuration("SharedDec", decoder="share"),
    Configuration("SharedEncSharedDec", encoder="share", decoder="share"),
    Configuration("SharedEncDec", encoder="share", decoder="share", across=True),
    Configuration("NoEnc", encoder="drop"),
    Configuration("NoDec", decoder="drop"),
    Configuration("NoEncNoDec", encoder="drop", decoder="drop"),
    Configuration("SharedEncNoDec", encoder="share", decoder="drop"),
    Configuration("OneWide", encoder="share", decoder="drop", match=True),
)
"""For models with an encoder and a decoder; those of one side alone are also for models that have only this one."""


@dataclass(frozen=True)
class FfnOptions(Choices):
    """Options of `share-ffn`. The history holds the fields in this order.

    Attributes:
        config: name of a configuration; excludes `encoder` and `decoder`; with none of the three: `default`, or
            SharedEnc or SharedDec for a model with one stack.
        encoder: what happens to the encoder's FFNs.
        decoder: what happens to the decoder's.
        width: hidden units of a shared FFN, or `match`: as many as all that it stands for have; None: as the
            initialisation makes it.
        init: how a shared FFN is made of those that it stands for; None: `concat` where it shall be wider than each of
            them, else `mean`.
        scale: factor of a shared FFN's output; None: 1, of a concatenation of k: 1/k, so that it computes their mean.
        groups: shared FFNs of a side, or of encoder and decoder; of both together where they share one.
        order: which layers share one, where there are several (appendix A).
        keep_units: which hidden units stay where an FFN gets narrower; None: none does, or `plan_ffn_on_text` chooses
            by activations.
        text: what activations are measured on, for the history.
        dense_only: whether mixtures of experts are left as they are; else they are refused.
        dtype: type of the result; None: as stored.
        seed: of new hidden units.
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
    text: Mapping[str, object] | None = None
    dense_only: bool = False
    dtype: str | None = None
    seed: int = 0

    cross = None  # a field of AttentionOptions, for code that handles both
    part = "FFN"
    configurations = CONFIGURATIONS
    default = "SharedEncNoDec"
    """Without options, for two stacks: what costs the paper's models least for what it saves."""


@dataclass(frozen=True)
class AttentionOptions(Choices):
    """Options of `share-attention`. The history holds the fields in this order.

    Attributes:
        config: name of a configuration of self-attention; excludes `encoder` and `decoder`; with none of the four:
            `default`, or SharedEnc or SharedDec for a model with one stack.
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

    # Fields of FfnOptions, for code that handles both.
    width = scale = keep_units = seed = None
    dense_only = False
    part = "attention"
    configurations = tuple(known for known in CONFIGURATIONS if not (known.across or known.match))
    default = "SharedEncSharedDec"
    """Without options, for two stacks: all self-attention shared."""


def chosen_configuration(options: FfnOptions | AttentionOptions, sides: Collection[Side]) -> Configuration:
    """The configuration that the options ask for, for a model with these stacks.

    Raises:
        UsageError: options that contradict each other, or a configuration that the model cannot hold.
    """
    name, cross = options.config, options.cross
    if name is not None and (options.encoder is not None or options.decoder is not None):
        raise UsageError("--config goes with neither --encoder nor --decoder.", "It says both already.")
    if name is None and options.encoder is options.decoder is cross is None:
        alone = "SharedEnc" if "encoder" in sides else "SharedDec"
        name = options.default if len(sides) > 1 else alone
    if name is None:
        found = Configuration("", options.encoder or "keep", options.decoder or "keep")
    else:
        found = find_configuration(name, sides, options.configurations)
    if "share" not in (found.encoder, found.decoder, cross):
        for option in ("width", "init", "scale", "groups", "order", "keep_units"):
            if getattr(options, option) is not None:
                raise UsageError(
                    f"--{option.replace('_', '-')} speaks of shared {options.part}s, and none are shared.",
                    "Leave it out.",
                )
    if found.across and options.groups is not None and len(options.groups) > 1:
        raise UsageError("--groups: encoder and decoder share the same FFNs.", "Give one number.")
    return replace(found, cross=cross or "keep")


def find_configuration(
    name: str, sides: Collection[Side], configurations: Sequence[Configuration] = CONFIGURATIONS
) -> Configuration:
    """The configuration of this name for a model with these stacks; upper and lower case are alike.

    A model with one stack also knows `Shared` and `No`, and `OneWide`: its FFNs as one, as wide as all of them (4.5).

    Args:
        configurations: the known configurations.

    Raises:
        UsageError: an unknown name, or a configuration that the model cannot hold.
    """
    known = list(configurations)
    if len(sides) == 1:
        (side,) = sides
        other = "decoder" if side == "encoder" else "encoder"
        known = [
            found
            for found in configurations
            if getattr(found, side) != "keep" and getattr(found, other) == "keep"
        ]
        share: dict[str, Any] = {side: "share"}
        drop: dict[str, Any] = {side: "drop"}
        known += [Configuration("Shared", **share), Configuration("No", **drop)]
        known += [Configuration(found.name, **share, match=True) for found in configurations if found.match]
    by_key = {_key(found.name): found for found in known}
    key = _key(name)
    if key in by_key:
        return by_key[key]
    possible = ", ".join(found.name for found in known)
    names = {_key(each): each for each in (*(found.name for found in configurations), "Shared", "No")}
    if key in names and len(sides) == 1:
        only = {"encoder": "an encoder", "decoder": "a decoder"}[side]
        raise UsageError(f"--config {name}: the model has only {only}.", f"It can be {possible}.")
    near = [names[close] for close in get_close_matches(key, names, n=2)]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f'--config "{name}": no such configuration.{hint}', f"This model can be {possible}.")


def _key(name: str) -> str:
    """`One Wide FFN` -> `onewide`; the paper writes both `Share…` and `Shared…`."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return re.sub(r"shared(?=enc|dec|$)", "share", letters.removesuffix("ffn"))
