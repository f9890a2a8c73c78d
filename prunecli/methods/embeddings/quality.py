"""How well something stands for an embedding table.

The error of a row e with the reconstruction o is |e - o|^2 / variance + cosine_weight (1 - cos(e, o)), where `variance`
is the weighted mean of |e - mean|^2 over the table: the first term is 1 minus the explained variance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from prunecli.methods.embeddings.table import Array, Table
from prunecli.progress import Progress, silent

Reconstruct = Callable[[int, int, Array], Tensor]
"""(start, stop, those rows) -> their reconstruction [stop - start, m]."""


@dataclass(frozen=True)
class Quality:
    """How well a table is reproduced: weighted means over its rows.

    Attributes:
        explained_variance: 1 - sum of w |e - o|^2 over sum of w |e - mean|^2; 1 is perfect.
        mean_cosine: of e and o; a row of zeros has the cosine 0.
        error: 1 - explained_variance + cosine_weight (1 - mean_cosine), which the fit minimises.
    """

    explained_variance: float
    mean_cosine: float
    error: float


@dataclass(frozen=True)
class Goal:
    """What a fit minimises.

    Attributes:
        weights: of the rows [V].
        variance: weighted mean of |e - mean|^2; 1 for a table of equal rows.
        cosine_weight: of 1 - cosine beside the squared error.
    """

    weights: Array
    variance: float
    cosine_weight: float

    def quality(self, squared: float, cosine: float) -> Quality:
        """Of a table with these weighted means of |e - o|^2 and cos(e, o)."""
        relative = squared / self.variance
        return Quality(1 - relative, cosine, relative + self.cosine_weight * (1 - cosine))

    def loss(self, numbers: Tensor, rows: Tensor, reconstruction: Tensor) -> Tensor:
        """Mean error of the rows that have these numbers [B], weighted; a scalar with a gradient."""
        weights = torch.from_numpy(self.weights)[numbers]
        errors = (rows - reconstruction).square().sum(-1) / self.variance
        if self.cosine_weight:
            errors = errors + self.cosine_weight * (1 - functional.cosine_similarity(rows, reconstruction))
        return (weights * errors).mean()


@torch.no_grad()
def measure(
    table: Table,
    goal: Goal,
    reconstruct: Reconstruct,
    progress: Progress = silent,
    name: str = "comparing rows",
) -> Quality:
    """One pass over the table, its rows compared with their reconstructions.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    squared = cosine = 0.0
    with progress(name, table.vocabulary, "rows") as advance:
        for start, stop, rows in table.chunks():
            weights = torch.from_numpy(goal.weights[start:stop]).double()
            own, other = torch.from_numpy(rows), reconstruct(start, stop, rows)
            squared += float(weights @ (own - other).square().sum(-1).double())
            cosine += float(weights @ functional.cosine_similarity(own, other).double())
            advance(stop - start)
    total = float(goal.weights.sum(dtype="float64"))
    return goal.quality(squared / total, cosine / total)
