"""Activations of the hidden units of experts: what stock experts return whose output weights are the identity."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.reference.stock_experts import every_output, expert_calls


@torch.no_grad()
def squared_activations(
    model: Any, ids: Tensor, mask: Tensor
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Axis of hidden units -> sum of (g a)^2 over the real tokens of its expert, and how many these are.

    Experts of gpt-oss are stacked in its files: theirs are one axis.
    """
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "gate_up_proj")}
    model.set_experts_implementation("eager")
    given = expert_calls(model, modules, input_ids=ids, attention_mask=mask, use_cache=False)
    sums, counts = {}, {}
    for name, (hidden, chosen, weights) in given.items():
        down, is_stacked = modules[name].down_proj, hasattr(modules[name], "down_proj_bias")  # gpt-oss
        down.copy_(torch.eye(*down.shape[1:]))
        if is_stacked:
            modules[name].down_proj_bias.zero_()
        for expert, active in enumerate(every_output(modules[name], hidden)):
            axis = f"{name}.units" if is_stacked else f"{name}.{expert}.units"
            places = ((chosen == expert) & mask.reshape(-1, 1).bool()).nonzero()
            rows = active[places[:, 0], : min(down.shape[1:])] * weights[*places.T][:, None]
            sums[axis] = sums.get(axis, 0) + rows.double().square().sum(dim=0).numpy()
            counts[axis] = counts.get(axis, 0) + len(rows)
    return sums, counts
