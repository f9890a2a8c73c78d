"""The best last linear step for what it reads: weighted ridge regression of what the unit still misses, in one pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prunecli.methods.embeddings.table import Array, Table
from prunecli.modules.define import DefineEmbedding
from prunecli.progress import Progress, silent

RIDGE = 1e-5
"""Of the features' mean square: keeps nearly equal features apart."""


@torch.no_grad()
def refine_reduction(
    unit: DefineEmbedding, table: Table, weights: Array, progress: Progress = silent
) -> None:
    """Add to the reduction the solution D of min sum of w |e - o - D f|^2 + ridge |D|^2 over the rows' features f.

    D = 0 is among the choices, so the weighted squared error never rises. f is the expansion and a constant 1. Without
    the reduction the last layer takes its place: each of its groups has a problem of its own, with the group's input
    and a constant 1 as f; where the groups share a block, one D without its constants solves all.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    groups = 1 if unit.reduce is not None else unit.shape.groups[-1]
    inputs = unit.shape.features if unit.reduce is not None else unit.shape.layers[-1].inputs
    width, outputs = inputs // groups + 1, table.model_dim // groups
    products = torch.zeros(groups, width, width, dtype=torch.float64)
    missing = torch.zeros(groups, width, outputs, dtype=torch.float64)
    with progress("solving for the reduction", table.vocabulary, "rows") as advance:
        for start, stop, rows in table.chunks():
            mapped = unit.map.weight[start:stop]
            *stages, reconstruction = unit.stages(mapped)
            features = unit.last_inputs(mapped, stages[-1])
            root = torch.from_numpy(weights[start:stop]).sqrt().unsqueeze(1)
            difference = (torch.from_numpy(rows) - reconstruction) * root
            for group, part in enumerate(difference.chunk(groups, dim=1)):
                known = torch.cat([features[:, group], torch.ones(len(rows), 1)], dim=1) * root
                products[group] += (known.T @ known).double()
                missing[group] += (known.T @ part).double()
            advance(stop - start)
    solve = _solve_shared if unit.shape.shared_blocks and groups > 1 else _solve
    added, constants = solve(products, missing)
    if unit.reduce is not None:
        unit.reduce.weight.add_(added[0].T)
        unit.reduce.bias.add_(constants)
    else:
        weight, bias = unit.group_layer(len(unit.layers) - 1)
        weight.add_(added)
        bias.add_(constants)


def _solve(products: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """[g, w + 1, w + 1] and [g, w + 1, o] -> a block [g, w, o] for each group, and constants [g o]."""
    solutions = torch.stack([_ridge(own, across) for own, across in zip(products, missing, strict=True)])
    return solutions[:, :-1], solutions[:, -1].flatten()


def _solve_shared(products: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """The same with one block [1, w, o] for all groups: each group's constants are solved for first, and put in."""
    total, means = products[0, -1, -1], products[:, :-1, -1:]
    own = products[:, :-1, :-1] - means @ means.mT / total
    across = missing[:, :-1] - means @ missing[:, -1:] / total
    block = _ridge(own.sum(0), across.sum(0))
    constants = (missing[:, -1] - means.squeeze(-1) @ block) / total
    return block.unsqueeze(0), constants.flatten()


def _ridge(products: Tensor, missing: Tensor) -> Tensor:
    from scipy.linalg import solve

    products.diagonal().add_(RIDGE * products.diagonal().mean())
    solution = solve(products.numpy(), missing.numpy(), assume_a="pos", overwrite_a=True, overwrite_b=True)
    return torch.from_numpy(np.ascontiguousarray(solution))
