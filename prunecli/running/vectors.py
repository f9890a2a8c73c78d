"""Texts as vectors: the hidden states of a batch, pooled as an embedding model says it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from prunecli.modules.pooling import Pooling
from prunecli.running.examples import Batch


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
