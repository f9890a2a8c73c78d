"""What stands in the place of a part that is gone, so that the residual connection adds nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Nothing(nn.Module):
    """In the place of an FFN, or a projection, that is removed: a zero without axes.

    It is a buffer, so that a forward pass makes no tensor; its type never raises that of what it is added to.
    """

    zero: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros((), device=device), persistent=False)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Whatever the input: 0 `[]`."""
        return self.zero


class NoAttention(Nothing):
    """In the place of an attention that is removed.

    A decoder's cache counts the tokens of its layers: self-attention keeps one zero a token in it.

    Args:
        layer: its number in the stack, under which the cache knows it; None: it has none (cross-attention, an encoder).
        position_bias: whether it is given a position bias and returns one, between its output and its weights.
        device: where the model will run.
    """

    def __init__(self, layer: int | None, *, position_bias: bool, device: torch.device) -> None:
        super().__init__(device)
        self.layer, self.position_bias = layer, position_bias

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *_: Any, past_key_values: Any = None, **options: Any
    ) -> tuple[Tensor | None, ...]:
        """Hidden states `[batch, T, d_model]` -> 0 `[]`, and no weights."""
        if past_key_values is not None and self.layer is not None:
            batch, tokens, _width = hidden_states.shape
            zeros = hidden_states.new_zeros(batch, 1, tokens, 1)
            # An encoder-decoder's cache has one of its own for each of both kinds.
            cache = getattr(past_key_values, "self_attention_cache", past_key_values)
            cache.update(zeros, zeros, self.layer)
        return (self.zero, options.get("position_bias"), None) if self.position_bias else (self.zero, None)
