"""What `factorize-embeddings` is asked, and the dimensions of the unit that this means."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal

from prunecli.choices import Choices
from prunecli.errors import UsageError
from prunecli.model.define import UnitKind, UnitShape
from prunecli.model.embedding import TokenTables

Sides = Literal["input", "output", "both"]

NARROWER, WIDER = 8, 2
"""Where no dimensions are given: k is 2 m, as in the paper's translation model (4.2: k = 1024, m = 512); n is
m / 8, half of the n = 128 there."""


@dataclass(frozen=True)
class EmbeddingOptions(Choices):
    """What `factorize-embeddings` is asked.

    Attributes:
        side: which tables to factorise; None: both where they are one, else the input's.
        map_dim: n; None: about m / 8.
        expand_dim: k; None: about 2 m.
        depth: expansion layers N; None: 3.
        max_groups: g_max; None: 4.
        kind: of the input's unit; None: define.
        shared_blocks: one block of weights for all groups of a layer of the unit.
        reduction: whether the unit ends with a linear layer from k to m; without it k is m.
        cache: write the rows of the input's unit instead of the unit.
        epochs: passes over the table at most; None: a few.
        dtype: type of the result; None: as stored.
        seed: of everything random.
    """

    side: Sides | None = None
    map_dim: int | None = None
    expand_dim: int | None = None
    depth: int | None = None
    max_groups: int | None = None
    kind: UnitKind | None = None
    shared_blocks: bool = False
    reduction: bool = True
    cache: bool = False
    epochs: int | None = None
    dtype: str | None = None
    seed: int = 0


def chosen_shape(tables: TokenTables, options: EmbeddingOptions, has_unit: bool) -> UnitShape:
    """The dimensions, those that are not given chosen so that they divide.

    Raises:
        UsageError: dimensions that cannot be.
    """
    kind = options.kind or "define"
    if not has_unit:  # the output's map is all there is
        if options.expand_dim is not None or options.depth is not None or options.max_groups is not None:
            raise UsageError(
                "--expand-dim, --depth and --max-groups are of the input's unit",
                "Choose --side input or both.",
            )
        if options.shared_blocks or not options.reduction:
            raise UsageError(
                "--shared-blocks and --no-reduction are of the input's unit", "Choose --side input or both."
            )
        if options.kind not in (None, "projective"):
            raise UsageError(f"--kind {kind} is of the input's unit", "Choose --side input or both.")
        kind = "projective"
    depth = 3 if options.depth is None else options.depth
    groups = 4 if options.max_groups is None else options.max_groups
    n, k = options.map_dim, options.expand_dim
    if n is None or k is None:
        unit = _multiple(groups, depth, kind)
        if n is None:
            n = min(max(round(tables.model_dim / NARROWER / unit), 1) * unit, max(tables.model_dim - 1, 1))
        if k is None and not options.reduction:
            k = (2 if kind == "hgt-residual" else 1) * tables.model_dim
        elif k is None:
            k = max(round(WIDER * tables.model_dim / (2 * unit)), 1) * 2 * unit
            k = max(k, -(-n // unit) * 2 * unit)
    if kind == "projective" and n == tables.model_dim:
        raise UsageError(
            f"The map dimension {n} is the model's width: a projection of it is a table as large as before",
            f"Give --map-dim below {n}; a unit that expands may have as much.",
        )
    return UnitShape(
        tables.vocabulary,
        n,
        tables.model_dim,
        k,
        depth,
        groups,
        kind,
        options.shared_blocks,
        options.reduction,
    )


def _multiple(groups: int, depth: int, kind: UnitKind) -> int:
    """What n and the inner widths are multiples of; 1 where there can be no unit, which its own check says."""
    if kind == "projective" or groups < 1 or depth < 1:
        return 1
    size = 2 * lcm(*range(1, groups + 1))  # that every number of groups divides
    return UnitShape(1, size, size + 1, 2 * size, depth, groups, kind).group_multiple
