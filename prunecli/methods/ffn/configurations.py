"""The configurations of Table 1 under the paper's names: what happens to the FFNs of the encoder and of the decoder."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

from prunecli.architectures.records import Side
from prunecli.errors import UsageError

Treatment = Literal["share", "keep", "drop"]
TREATMENTS: tuple[Treatment, ...] = get_args(Treatment)


@dataclass(frozen=True)
class Configuration:
    """One row of the table.

    Attributes:
        name: as in the paper.
        encoder: what happens to the encoder's FFNs.
        decoder: what happens to the decoder's.
        across: whether encoder and decoder share one FFN, instead of one each.
        match: whether the shared FFN is as wide as all that it stands for together.
    """

    name: str
    encoder: Treatment = "keep"
    decoder: Treatment = "keep"
    across: bool = False
    match: bool = False

    def fits(self, sides: Collection[Side]) -> bool:
        """Whether a model with these stacks can hold it."""
        return set(sides) == {"encoder", "decoder"} or (bool(self._treated) and self._treated <= set(sides))

    @property
    def _treated(self) -> set[Side]:
        found: set[Side] = set()
        if self.encoder != "keep":
            found.add("encoder")
        if self.decoder != "keep":
            found.add("decoder")
        return found


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

NAMES = tuple(configuration.name for configuration in CONFIGURATIONS)


def find_configuration(name: str, sides: Collection[Side]) -> Configuration:
    """The configuration of this name for a model with these stacks; upper and lower case are alike.

    A model with one stack also knows `Shared` and `No`, and `OneWide`: its FFNs as one, as wide as all of them (4.5).

    Raises:
        UsageError: an unknown name, or a configuration that the model cannot hold.
    """
    known = {_key(found.name): found for found in CONFIGURATIONS if found.fits(sides)}
    if len(sides) == 1:
        known |= {_key(found.name): found for found in _of_one(next(iter(sides)))}
    key = _key(name)
    if key in known:
        return known[key]
    possible = ", ".join(found.name for found in known.values())
    if key in map(_key, NAMES):
        raise UsageError(
            f"--config {name}: the model has only {_article(next(iter(sides)))}.", f"It can be {possible}."
        )
    names = {_key(known_name): known_name for known_name in (*NAMES, "Shared", "No")}
    near = [names[close] for close in get_close_matches(key, names, n=2)]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f'--config "{name}": no such configuration.{hint}', f"This model can be {possible}.")


def _of_one(side: Side) -> tuple[Configuration, ...]:
    if side == "encoder":
        return (
            Configuration("Shared", encoder="share"),
            Configuration("No", encoder="drop"),
            Configuration("OneWide", encoder="share", match=True),
        )
    return (
        Configuration("Shared", decoder="share"),
        Configuration("No", decoder="drop"),
        Configuration("OneWide", decoder="share", match=True),
    )


def _key(name: str) -> str:
    """`One Wide FFN` -> `onewide`; the paper writes both `Share…` and `Shared…`."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return re.sub(r"shared(?=enc|dec|$)", "share", letters.removesuffix("ffn"))


def _article(side: Side) -> str:
    return "an encoder" if side == "encoder" else "a decoder"
