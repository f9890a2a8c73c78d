"""Activations of the hidden units of experts, computed expert by expert from what a stock block is given."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.reference.stock_experts import expert_calls


def squared_activations(
    model: Any, ids: Tensor, mask: Tensor
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Axis of hidden units -> sum of (g a)^2 over the real tokens of its expert, and how many these are.

    Experts of gpt-oss are stacked in its files: theirs are one axis.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if name.endswith(".experts") and hasattr(module, "gate_up_proj")
    }
    with torch.no_grad():
        given = expert_calls(model, modules, input_ids=ids, attention_mask=mask, use_cache=False)
    real = mask.reshape(-1).bool()
    model.requires_grad_(False)
    sums = {}
    counts = {}
    for name, (hidden, chosen, weights) in given.items():
        module = modules[name]
        hidden = hidden.reshape(-1, hidden.shape[-1]).double()
        is_stacked = hasattr(module, "gate_up_proj_bias")  # gpt-oss
        for expert in range(module.gate_up_proj.shape[0]):
            up = module.gate_up_proj[expert].double()
            if is_stacked:
                both = hidden @ up + module.gate_up_proj_bias[expert].double()
                gate, linear = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
                active = (linear + 1) * gate * torch.sigmoid(gate * 1.702)
            else:
                gate, linear = functional.linear(hidden, up).chunk(2, dim=-1)
                active = functional.silu(gate) * linear
            axis = f"{name}.units" if is_stacked else f"{name}.{expert}.units"
            places = ((chosen == expert) & real[:, None]).nonzero()
            rows = active[places[:, 0]] * weights[places[:, 0], places[:, 1]].double()[:, None]
            sums[axis] = sums.get(axis, 0) + rows.square().sum(dim=0).numpy()
            counts[axis] = counts.get(axis, 0) + len(rows)
    return sums, counts
