"""What the methods that share parts between layers have in common (2309.01826): configurations, groups of layers.

The configurations of Table 1 under the paper's names say what happens to the FFNs, or (appendix B) the attentions, of
the encoder and of the decoder.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.architectures.records import Side

Treatment = Literal["share", "keep", "drop"]
Order = Literal["sequence", "cycle", "cycle-reverse"]
Init = Literal["mean", "first", "last"]
"""How one is made of several."""
SIDES: tuple[Side, ...] = ("encoder", "decoder")


class Part(Protocol):
    """An FFN or an attention: `FfnLayer`, `AttentionLayer`."""

    @property
    def name(self) -> str:
        """Its name in `Structure`."""

    @property
    def owner(self) -> str:
        """The one whose tensors it runs."""


Layer = TypeVar("Layer", bound=Part)


@dataclass(frozen=True)
class Configuration:
    """One row of the table.

    Attributes:
        name: as in the paper.
        encoder: what happens to the encoder's FFNs, or attentions.
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
        treated = {side for side in SIDES if getattr(self, side) != "keep"}
        return set(sides) == set(SIDES) or (bool(treated) and treated <= set(sides))


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
    known = {_key(found.name): found for found in configurations if found.fits(sides)}
    if len(sides) == 1:
        match = any(found.match for found in configurations)
        (side,) = sides
        share: dict[str, Any] = {side: "share"}
        drop: dict[str, Any] = {side: "drop"}
        alone = [Configuration("Shared", **share), Configuration("No", **drop)]
        alone += [Configuration("OneWide", **share, match=True)] if match else []
        known |= {_key(found.name): found for found in alone}
    key = _key(name)
    if key in known:
        return known[key]
    possible = ", ".join(found.name for found in known.values())
    all_names = [found.name for found in configurations]
    if key in map(_key, all_names):
        (side,) = sides
        only = "an encoder" if side == "encoder" else "a decoder"
        raise UsageError(f"--config {name}: the model has only {only}.", f"It can be {possible}.")
    names = {_key(known_name): known_name for known_name in (*all_names, "Shared", "No")}
    near = [names[close] for close in get_close_matches(key, names, n=2)]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f'--config "{name}": no such configuration.{hint}', f"This model can be {possible}.")


def _key(name: str) -> str:
    """`One Wide FFN` -> `onewide`; the paper writes both `Share…` and `Shared…`."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return re.sub(r"shared(?=enc|dec|$)", "share", letters.removesuffix("ffn"))


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
            f"--groups {groups}: {layers} {what} to share; {reason}.", f"Choose one of {', '.join(divisors)}."
        )
    if order == "sequence":
        return [layer // (layers // groups) for layer in range(layers)]
    numbers = [layer % groups for layer in range(layers)]
    return numbers if order == "cycle" else numbers[:-groups] + numbers[-groups:][::-1]


def in_groups(
    layers: Sequence[Layer], groups: int, order: Order, what: str = "FFNs"
) -> list[tuple[Layer, ...]]:
    """`layers` by their groups: see `group_numbers`."""
    numbers = group_numbers(len(layers), groups, order, what)
    return [
        tuple(layer for layer, own in zip(layers, numbers, strict=True) if own == number)
        for number in range(groups)
    ]


def owners(layers: Sequence[Part]) -> list[str]:
    """Whose tensors they run, in their order."""
    return list(dict.fromkeys(layer.owner for layer in layers))


def refuse_parting(clusters: Sequence[Sequence[Part]], what: str, remedy: str) -> None:
    """Refuse to part layers that share what they run already.

    Args:
        clusters: that shall share in the result.
        what: they share: "FFN".
        remedy: in the message.

    Raises:
        UsageError: two clusters run the same tensors.
    """
    first: dict[str, int] = {}
    for number, members in enumerate(clusters):
        for layer in members:
            if first.setdefault(layer.owner, number) != number:
                other = next(part for part in clusters[first[layer.owner]] if part.owner == layer.owner)
                raise UsageError(
                    f"{layer.name} and {other.name} share one {what} already and would be parted.", remedy
                )
