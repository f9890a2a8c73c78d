"""The losses of examples: what a model is trained for in translation, classification and language modelling.

An example's loss is the mean cross-entropy of its counted tokens (in nats; of its class in classification). It does
not depend on the batch that the example is in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from prunecli.errors import DataError
from prunecli.modules.logits import Logits
from prunecli.modules.pooling import Pooling
from prunecli.progress import Progress, silent
from prunecli.running.batches import batch_cost, run_forward, shown_groups
from prunecli.running.examples import IGNORED, Batch, num_examples
from prunecli.running.runner import Runner


def token_losses(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of the counted tokens' cross-entropies of each example, and how many there are.

    Returns:
        sums `[B]` float32 on the model's device, differentiable; counts `[B]` int64 on the CPU. In classification the
        one class of an example counts as its token.
    """
    labels = batch.labels
    counted = labels != IGNORED
    counts = counted.sum(dim=1) if labels.dim() > 1 else torch.ones_like(labels)
    targets, mask = labels[counted].to(model.device), counted.to(model.device)
    logits = Logits(model, batch.arguments(model), mask)

    def block_losses(number: int, place: slice) -> Tensor:
        return functional.cross_entropy(logits.block(number).float(), targets[place], reduction="none")

    losses = torch.cat(logits.each(block_losses))
    if labels.dim() < 2:
        return losses, counts
    return losses.new_zeros(labels.shape).masked_scatter(mask, losses).sum(dim=1), counts


def example_losses(model: Any, batch: Batch) -> Tensor:
    """Mean loss of each example's counted tokens, `-1/T sum_t log p(y_t | ...)`; of its class in classification.

    Args:
        model: in evaluation mode, with the task's head (`require_task`).

    Returns:
        `[B]` float32 on the model's device, differentiable; 0 for an example without counted tokens.
    """
    sums, counts = token_losses(model, batch)
    return sums / counts.clamp(min=1).to(sums.device)


def require_finite(losses: Tensor, batch: Batch, text: str | None = None) -> None:
    """Refuse losses that nothing can be computed from.

    Args:
        text: what the message calls the text, where there are several.

    Raises:
        DataError: a loss is NaN or infinite; the message names the example.
    """
    finite = torch.isfinite(losses).tolist()
    if not all(finite):
        row = finite.index(False)
        example = f"example {batch.indices[row] + 1:,}"
        raise DataError(
            f"{example if text is None else f'{text}, {example}'}: the loss is {losses[row].item()}, "
            "not a finite number",
            "The weights are damaged, or overflow the type: try `dtype=float32`.",
        )


def measure_losses(
    runner: Runner, batches: Sequence[Batch], count: int, what: str, progress: Progress = silent
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`token_losses` of all batches.

    Args:
        count: of the examples.
        what: is done, for the progress.

    Returns:
        Of each example `[count]` the sum of the counted tokens' cross-entropies, and how many there are; 0 of examples
        in no batch. Examples of one number in several batches add up.

    Raises:
        DataError: a loss is not finite.
        UsageError, CheckpointError, OutputError: as `runner` does.
    """
    nats, tokens = np.zeros(count), np.zeros(count, np.int64)

    def read(batch: Batch) -> int:
        return int(batch.inputs["attention_mask"].sum())

    def finish(batch: Batch, losses: tuple[Tensor, Tensor]) -> int:
        sums, counts = losses
        require_finite(sums, batch)
        nats[[*batch.indices]] += sums.double().cpu().numpy()
        tokens[[*batch.indices]] += counts.numpy()
        return read(batch)

    line = what, sum(map(read, batches)), "tokens"
    run_forward(runner, batches, partial(token_losses, runner.model), finish, line, progress)
    return nats, tokens


Losses = Callable[[Any, Batch], Tensor]
"""From a model and a batch to the loss of each example, `[B]`, differentiable."""


def differentiate_losses(
    runner: Runner,
    batches: Mapping[str, Sequence[Batch]],
    losses_of: Losses,
    progress: Progress,
) -> None:
    """Backward passes of the sum of each batch's losses; what comes of them is for an observer.

    The examples of a batch do not interact, so the gradient of the sum of their losses holds each example's own.

    Args:
        batches: what a message calls their text -> batches.
        losses_of: of the examples of a batch.

    Raises:
        DataError: a loss is not finite.
        UsageError, CheckpointError, OutputError: as `runner` does.
    """
    texts = [text for text, of_text in batches.items() for _ in of_text]
    every = [batch for of_text in batches.values() for batch in of_text]

    def start(first: int, number: int, losses: Tensor) -> Tensor:
        require_finite(losses.detach(), every[first + number], texts[first + number])
        return losses.sum()

    cost = partial(batch_cost, backward=True)
    line = "scoring units", num_examples(every), "examples"
    with shown_groups(runner, every, cost, line, progress, ways=2) as (groups, advance, step):
        for group in groups:
            with runner.running(group, step) as run:
                passes = [partial(losses_of, runner.model, batch) for batch in group.batches]
                run.backward(passes, partial(start, group.start))
            advance(num_examples(group.batches))


def batch_vectors(model: Any, pooling: Pooling, batch: Batch) -> Tensor:
    """`[B, width]` float32 on the model's device, differentiable; a head that the model has is not run."""
    headless = model.base_model
    hidden: Tensor = headless(**batch.arguments(headless)).last_hidden_state
    return pooling(hidden, batch.inputs["attention_mask"])


def random_projections(pooling: Pooling, model: Any, batch: Batch) -> Tensor:
    """r_x^T v(x) / |v(x)| for each text x, with r_x ~ N(0, I), drawn anew for each number of a text.

    The distance to the vector that the whole model makes has no gradient at the whole model. This has: the mean over r
    of |d/dxi r^T u|, with u = v / |v| and a mask xi, is sqrt(2 / pi) |du/dxi|, and |du/dxi|^2 is to second order
    the distance |u(xi = 1) - u(xi = 0)|^2 = 2 (1 - cos) that the mask makes.

    Returns:
        `[B]` float32 on the model's device, differentiable.
    """
    units = functional.normalize(batch_vectors(model, pooling, batch), dim=1)
    width = units.shape[1]
    drawn = [np.random.default_rng(number).standard_normal(width, np.float32) for number in batch.indices]
    return (units * torch.from_numpy(np.stack(drawn)).to(units.device)).sum(dim=1)
