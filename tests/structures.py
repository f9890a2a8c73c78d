"""Parts of a `Structure`, shortly."""

from collections.abc import Mapping, Sequence

from prunecli.model.axes import Kind, axis_name
from prunecli.model.structure import KeptUnits, Structure


def axes_of(kind: Kind, kept: Mapping[str, Sequence[int]], of: int) -> dict[str, KeptUnits]:
    """`Structure.axes` of a model that keeps these units of `of` in each owner."""
    return {axis_name(owner, kind): KeptUnits(tuple(ids), of) for owner, ids in kept.items()}


def kept_ids(structure: Structure, kind: Kind) -> dict[str, tuple[int, ...]]:
    """Owner -> original ids of the units that it keeps, where some are gone."""
    return {owner: units.kept for owner, units in structure.of_kind(kind).items()}
