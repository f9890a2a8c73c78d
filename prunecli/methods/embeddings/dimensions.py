"""What `factorize-embeddings` is asked, and the dimensions of the unit that this means."""

from __future__ import annotations

from math import lcm

from prunecli.errors import UsageError
from prunecli.methods.embeddings.options import EmbeddingOptions
from prunecli.model.define import UnitKind, UnitShape
from prunecli.model.embedding import TokenTables

NARROWER, WIDER = 8, 2
"""Where no dimensions are given: k is 2 m, as in the paper's translation model (4.2: k = 1024, m = 512); n is
m / 8, half of the n = 128 there."""


def chosen_shape(tables: TokenTables, options: EmbeddingOptions, has_unit: bool) -> UnitShape:
    """The dimensions, those that are not given chosen so that they divide.

    Raises:
        UsageError: dimensions that cannot be.
    """
    kind = options.kind or "define"
    if not has_unit:  # the output's map is all there is
        if options.expand_dim is not None or options.depth is not None or options.max_groups is not None:
            raise UsageError(
                "`expand_dim`, `depth` and `max_groups` are for the unit of the input",
                "Choose `side=input` or `side=both`.",
            )
        if options.shared_blocks or not options.reduction:
            raise UsageError(
                "`shared_blocks` and `reduction=False` are for the unit of the input",
                "Choose `side=input` or `side=both`.",
            )
        if options.kind not in (None, "projective"):
            raise UsageError(
                f"`kind={kind}` is for the unit of the input", "Choose `side=input` or `side=both`."
            )
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
            f"Give `map_dim` below {n}; a unit that expands may have as much.",
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
