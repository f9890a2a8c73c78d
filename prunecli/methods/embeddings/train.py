"""Adam over mini-batches of a table's rows: map table, layers and reduction of a DeFINE unit at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, cos, isfinite, pi

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from prunecli.errors import UsageError
from prunecli.methods.embeddings.table import Goal, Table
from prunecli.modules.define import DefineEmbedding
from prunecli.progress import Progress, silent

RUN_ROWS = 32
"""Rows of a mini-batch come in runs of this many neighbours; each run is one read."""
PLAIN_WIDTH = 512
"""Widest reduction whose weights take the whole learning rate."""
WARM_UP = 0.05
"""Part of the steps over which the learning rate rises."""
ROWS_SEEN = 1_000_000
LEAST_EPOCHS, MOST_EPOCHS = 4, 60
"""Where no number of epochs is given, they come nearest to `ROWS_SEEN` rows within these bounds."""


@dataclass(frozen=True)
class FitOptions:
    """How long and how hard to fit.

    Attributes:
        epochs: passes over the table at most; 0 leaves the unit at its start. None: as many as come nearest to a
            million rows, from 4 to 60.
        batch_rows: rows of a mini-batch.
        learning_rate: of the layers at its highest; it falls to 0 along a cosine. Units wider than `PLAIN_WIDTH` take
            less, in inverse proportion to their width.
        map_learning_rate: of the map table, whose columns start with variance 1.
        cosine_weight: of 1 - cosine beside the squared error.
        output_weight: of the error of U P^T beside that of the unit, where the output layer reads the map table U.
        tolerance: from half way on, stop after a pass that lowers the error by less than this part.
        power: of the token frequencies as weights of the rows.
        seed: of everything random.

    Raises:
        UsageError: a negative number of epochs, or seed.
    """

    epochs: int | None = None
    batch_rows: int = 256
    learning_rate: float = 2e-3
    map_learning_rate: float = 5e-2
    cosine_weight: float = 0.2
    output_weight: float = 1.0
    tolerance: float = 1e-3
    power: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("number of epochs", self.epochs or 0),
            ("seed", self.seed),
        ):
            if value < 0:
                raise UsageError(f"The {name} is {value}", "Give a number of at least 0.")

    def passes(self, vocabulary: int) -> int:
        """Passes over a table of `vocabulary` rows."""
        if self.epochs is not None:
            return self.epochs
        return min(max(round(ROWS_SEEN / vocabulary), LEAST_EPOCHS), MOST_EPOCHS)


def train(
    unit: DefineEmbedding,
    table: Table,
    goal: Goal,
    options: FitOptions,
    output: nn.Module | None = None,
    progress: Progress = silent,
) -> tuple[float, ...]:
    """Lower the error of the unit's rows; each row of the map table has Adam moments of its own.

    Args:
        unit: in float32; changed in place.
        table: the rows to come near to.
        goal: the error.
        options: epochs, rates and weights.
        output: map vectors [B, n] -> rows [B, m]: trained beside the unit with `options.output_weight`, and left to
            the caller, who knows the exact solution for a given map table.
        progress: told of the rows; the name of each line holds the error so far.

    Returns:
        The mean error during each pass, without the output's.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    passes = options.passes(table.vocabulary)
    step = _stepper(unit, goal, options, output, passes * _steps(table, options))
    errors: list[float] = []
    for epoch in range(passes):
        total, rows = 0.0, 0
        so_far = f" (error {errors[-1]:.4f})" if errors else ""
        with progress(f"fitting, pass {epoch + 1} of {passes}{so_far}", table.vocabulary, "rows") as advance:
            for numbers, batch in batches(table, options, epoch):
                total += step(numbers, batch) * len(numbers)
                rows += len(numbers)
                advance(len(numbers))
        errors.append(total / rows)
        if not isfinite(errors[-1]):
            break
        if 2 * epoch >= passes and errors[-2] - errors[-1] < options.tolerance * errors[-2]:
            break
    return tuple(errors)


def _stepper(
    unit: DefineEmbedding, goal: Goal, options: FitOptions, output: nn.Module | None, total: int
) -> Callable[[Tensor, Tensor], float]:
    """One step of both optimizers on a mini-batch; the unit's error before it."""
    dense = [value for name, value in unit.named_parameters() if name != "map.weight"]
    rate = options.learning_rate * min(PLAIN_WIDTH / unit.shape.features, 1)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam([*dense, *(output.parameters() if output else ())], lr=rate),
        torch.optim.SparseAdam([unit.map.weight], lr=options.map_learning_rate),
    ]
    warm = max(round(WARM_UP * total), 1)

    def part_of_rate(number: int) -> float:
        """Of the highest learning rate: a linear rise, then half a cosine down to 0."""
        if number < warm:
            return (number + 1) / warm
        return 0.5 * (1 + cos(pi * (number - warm) / max(total - warm, 1)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, part_of_rate) for optimizer in optimizers]

    def step(numbers: Tensor, batch: Tensor) -> float:
        mapped = functional.embedding(numbers, unit.map.weight, sparse=True)
        loss = own = goal.loss(numbers, batch, unit.transform(mapped))
        if output is not None:
            loss = own + options.output_weight * goal.loss(numbers, batch, output(mapped))
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        return float(own.detach())

    return step


def _run(table: Table, options: FitOptions) -> int:
    return min(RUN_ROWS, options.batch_rows, table.vocabulary)


def _steps(table: Table, options: FitOptions) -> int:
    run = _run(table, options)
    return ceil(ceil(table.vocabulary / run) / (options.batch_rows // run))


def batches(table: Table, options: FitOptions, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Numbers [B] and rows [B, m] of mini-batches that cover the table once; its runs come in random order.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    run = _run(table, options)
    starts = np.random.default_rng((options.seed, epoch)).permutation(np.arange(0, table.vocabulary, run))
    together = options.batch_rows // run
    for place in range(0, len(starts), together):
        spans = [
            (start, min(start + run, table.vocabulary)) for start in starts[place : place + together].tolist()
        ]
        numbers = np.concatenate([np.arange(*span) for span in spans])
        rows = np.concatenate([table.rows(*span) for span in spans])
        yield torch.from_numpy(numbers), torch.from_numpy(rows)
