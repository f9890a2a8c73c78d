"""Options of `share-ffn` and `share-attention`, and the configurations of 2309.01826, Table 1, by the paper's names.

A configuration says what happens to the FFNs, or (appendix B) the attentions, of the encoder and of the decoder.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from prunecli.architectures.records import Side
from prunecli.errors import UsageError
from prunecli.options import (
    STORED_DTYPE,
    Counts,
    Options,
    StoredDtype,
    advanced_option,
    option,
    selection_option,
)
from prunecli.text.files import near_names

Treatment = Literal["share", "keep", "drop"]
Order = Literal["sequence", "cycle", "cycle-reverse"]
Init = Literal["mean", "first", "last"]
"""How one attention is made of several."""
FfnInit = Literal[Init, "concat"]
"""How one FFN is made of several."""
KeepUnits = Literal["norms", "activations"]
"""Hidden units to keep where a shared FFN gets narrower."""
Width = (
    Annotated[int, Field(ge=1)]
    | Annotated[Literal["match"], BeforeValidator(lambda value: str(value).strip().lower())]
    | None
)
"""Hidden units of a shared FFN; `match`: as many as all FFNs that it replaces."""


@dataclass(frozen=True)
class Configuration:
    """Treatment of each kind of FFN or attention: one row of the table.

    Attributes:
        name: as in the paper; "" for treatments that the user gave one by one.
        encoder: what happens to the encoder's FFNs or self-attention.
        decoder: what happens to the decoder's.
        cross: what happens to cross-attention.
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


class SharingOptions(Options):
    """Options of both commands that share or drop parts of layers."""

    part: ClassVar[Literal["FFN", "attention"]]
    parts: ClassVar[str]
    configurations: ClassVar[tuple[Configuration, ...]] = CONFIGURATIONS
    default: ClassVar[str]
    """Configuration if no option names one, for a model with two stacks."""

    preset: str | None
    encoder: Treatment | None = option(
        "{cls.parts} of the encoder, instead of --preset: share, keep or drop."
    )
    decoder: Treatment | None = option(
        "{cls.parts} of the decoder, instead of --preset: share, keep or drop."
    )
    cross: Treatment | None = None
    width: Width = None
    init: FfnInit | None = None
    scale: float | None = None
    groups: Counts | None = None
    order: Order | None = advanced_option(
        "Layers that share one: sequence, cycle, cycle-reverse; for six layers in three groups 1 1 2 2 3 3, "
        "1 2 3 1 2 3, 1 2 3 3 2 1. Default: sequence.",
    )
    keep_units: KeepUnits | None = None
    text: Mapping[str, object] | None = None
    dense_only: bool = False
    dtype: StoredDtype | None = STORED_DTYPE
    seed: int = 0


class FfnOptions(SharingOptions):
    """Options of `share-ffn`.

    Attributes:
        text: what activations are measured on, for the history.
    """

    part = "FFN"
    parts = "FFNs"
    default = "SharedEncNoDec"
    """What costs the paper's models least for what it saves."""

    preset: str | None = option(
        "Configuration of the paper: SharedEnc, SharedDec, SharedEncSharedDec, SharedEncDec, NoEnc, NoDec, NoEncNoDec, "
        "SharedEncNoDec, OneWide. Default: SharedEncNoDec; SharedEnc or SharedDec for a model with one stack.",
        metavar="NAME",
        excludes="encoder decoder",
    )
    width: Width = option(
        "Number of hidden units of a shared FFN; match: as many as all FFNs that it replaces. Default: as --init makes "
        "it.",
    )
    init: FfnInit | None = selection_option(
        "How a shared FFN is made of those that it replaces: mean of their weights, first, last, or concat: side by "
        "side. Default: concat if --width is larger than theirs, else mean.",
    )
    groups: Counts | None = selection_option(
        "Number of shared FFNs of a stack; or of the encoder and of the decoder. Default: 1.",
        metavar="N[,M]",
        max_length=2,
    )
    keep_units: KeepUnits | None = selection_option(
        "Hidden units to keep if an FFN gets narrower, by norms, activations: those with the largest weights, or the "
        "most active ones on --data or --text. Default: activations.",
    )
    scale: float | None = advanced_option(
        "Factor of a shared FFN's output. Default: 1; for concat of k FFNs 1/k, so that the output is the mean.",
    )
    dense_only: bool = advanced_option(
        "Leave mixtures of experts as they are, instead of an error.",
        False,
    )
    seed: int = advanced_option(
        "Seed of new hidden units.",
        0,
    )


class AttentionOptions(SharingOptions):
    """Options of `share-attention`."""

    part = "attention"
    parts = "Self-attention"
    configurations = tuple(known for known in CONFIGURATIONS if not (known.across or known.match))
    default = "SharedEncSharedDec"

    preset: str | None = option(
        "Configuration of self-attention, as in the paper: SharedEnc, SharedDec, SharedEncSharedDec, NoEnc, NoDec, "
        "NoEncNoDec, SharedEncNoDec. Default: SharedEncSharedDec, or Shared for a model with one stack.",
        metavar="NAME",
        excludes="encoder decoder",
    )
    cross: Treatment | None = option("Cross-attention: share, keep or drop. Default: keep.")
    init: Init | None = selection_option(
        "How a shared attention is made of those that it replaces: mean of their weights, first, or last. Default: "
        "mean.",
    )
    groups: Counts | None = selection_option(
        "Number of shared attentions of each kind; or of the encoder and of the decoder; or of these and of "
        "cross-attention. Default: 1.",
        metavar="N[,M[,K]]",
        max_length=3,
    )


def chosen_configuration(options: SharingOptions, sides: Collection[Side]) -> Configuration:
    """Choose the treatment of each kind of FFN or attention of a model with these stacks.

    Raises:
        UsageError: options that contradict each other, or a configuration that the model cannot hold.
    """
    name, cross = options.preset, options.cross
    if name is None and options.encoder is options.decoder is cross is None:
        alone = "SharedEnc" if "encoder" in sides else "SharedDec"
        name = options.default if len(sides) > 1 else alone
    if name is None:
        found = Configuration("", options.encoder or "keep", options.decoder or "keep")
    else:
        found = find_configuration(name, sides, options.configurations)
    if "share" not in (found.encoder, found.decoder, cross):
        names = ("width", "init", "scale", "groups", "order", "keep_units")
        options.refuse(names, f"is for shared {options.part}s, and none are shared.")
    if found.across and options.groups is not None and len(options.groups) > 1:
        raise UsageError("`groups`: encoder and decoder share the same FFNs.", "Give one number.")
    return replace(found, cross=cross or "keep")


def find_configuration(
    name: str, sides: Collection[Side], configurations: Sequence[Configuration] = CONFIGURATIONS
) -> Configuration:
    """The configuration of this name for a model with these stacks; upper and lower case are alike.

    A model with one stack also knows `Shared` and `No`, and `OneWide`: its FFNs as one, as wide as all of them (4.5).

    Args:
        configurations: those that there are.

    Raises:
        UsageError: an unknown name, or a configuration that the model cannot hold.
    """
    known = list(configurations)
    if len(sides) == 1:
        (side,) = sides
        other = "decoder" if side == "encoder" else "encoder"
        known = [found for found in configurations if getattr(found, other) == "keep"]
        share: dict[str, Any] = {side: "share"}
        drop: dict[str, Any] = {side: "drop"}
        known += [Configuration("Shared", **share), Configuration("No", **drop)]
        known += [Configuration(found.name, **share, match=True) for found in configurations if found.match]
    for found in known:
        if _key(found.name) == _key(name):
            return found
    raise UsageError(
        f"`preset={name}`: no such configuration of a model with {' and '.join(sorted(sides))}.",
        near_names(name, [found.name for found in known], "It can be"),
    )


def _key(name: str) -> str:
    """`One Wide FFN` -> `onewide`; the paper writes both `Share…` and `Shared…`."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return re.sub(r"shared(?=enc|dec|$)", "share", letters.removesuffix("ffn"))
