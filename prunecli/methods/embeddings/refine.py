"""The best reduction for given features: weighted ridge regression of what the unit still misses, in one pass."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

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

    D = 0 is among the choices, so the weighted squared error never rises. f is the expansion and a constant 1.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    width = unit.shape.features + 1
    products = torch.zeros(width, width, dtype=torch.float64)
    missing = torch.zeros(width, table.model_dim, dtype=torch.float64)
    with progress("solving for the reduction", table.vocabulary, "rows") as advance:
        for start, stop, rows in table.chunks():
            features = unit.expand(unit.map.weight[start:stop])
            root = torch.from_numpy(weights[start:stop]).sqrt().unsqueeze(1)
            difference = (torch.from_numpy(rows) - unit.reduce(features)) * root
            known = torch.cat([features, torch.ones(len(rows), 1)], dim=1) * root
            products += (known.T @ known).double()
            missing += (known.T @ difference).double()
            advance(stop - start)
    products.diagonal().add_(RIDGE * products.diagonal().mean())
    added = _solve(products.numpy(), missing.numpy())
    unit.reduce.weight.add_(torch.from_numpy(added[:-1].T))
    unit.reduce.bias.add_(torch.from_numpy(added[-1]))


def _solve(products: NDArray[np.float64], missing: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.linalg import solve

    found: NDArray[np.float64] = solve(products, missing, assume_a="pos", overwrite_a=True, overwrite_b=True)
    return found
