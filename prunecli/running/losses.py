"""The losses of examples: what a model is trained for in translation, classification and language modelling.

An example's loss is the mean cross-entropy of its counted tokens (in nats; of its class in classification). It does
not depend on the batch that the example is in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from prunecli.errors import DataError
from prunecli.modules.logits import Logits
from prunecli.running.examples import IGNORED, Batch


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
            "The weights are damaged, or overflow the type: try --dtype float32.",
        )
