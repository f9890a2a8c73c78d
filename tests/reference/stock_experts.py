"""What each expert of a transformers class does: every expert on every token, by the class's own eager forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def every_output(module: Any, hidden: Tensor) -> Tensor:
    """`[experts, tokens, width]`: what each expert makes of each token, before any weight.

    Args:
        module: of experts, of a model whose implementation is "eager".
        hidden: `[tokens, width]`.
    """
    one = hidden.new_ones(len(hidden), 1)
    return torch.stack(
        [
            module(hidden, torch.full((len(hidden), 1), expert, dtype=torch.int64), one)
            for expert in range(module.num_experts)
        ]
    )


def expert_calls(
    model: Any, modules: dict[str, Any], **inputs: Any
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Name of a module of experts -> the hidden states, experts and weights that a pass of `model` hands to it."""
    calls: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, args: tuple[Tensor, Tensor, Tensor]) -> None:
            calls[name] = args

        return hook

    handles = [module.register_forward_pre_hook(keep(name)) for name, module in modules.items()]
    try:
        model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls
