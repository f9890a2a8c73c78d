"""What the demo's training minimises beside the cross-entropy: how tokens spread over experts, and by language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prunecli.modules.sparse_ffn import SparseFFN


class Gates:
    """Holds the gates of the last forward pass of every sparse FFN, with gradients: `[tokens, num_experts]` each."""

    def __init__(self, sparse: dict[str, SparseFFN]) -> None:
        self.by_layer: dict[str, Tensor] = {}
        for name, module in sparse.items():
            module.router.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def keep(_module: Any, _inputs: Any, logits: Tensor) -> None:
            self.by_layer[name] = torch.softmax(logits, dim=-1)

        return keep


@dataclass(frozen=True)
class RoutingWeights:
    """Weights of the terms of `routing_loss`."""

    balance: float
    concentration: float


def by_language(gates: Tensor, languages: Tensor, count: int) -> Tensor:
    """p(e|l): mean gate values `[count, num_experts]` over the tokens of each language.

    Args:
        gates: `[tokens, num_experts]`.
        languages: `[tokens]` index of each token's language, below `count`.
    """
    one_hot = torch.nn.functional.one_hot(languages, count).to(gates.dtype)
    return one_hot.T @ gates / one_hot.sum(dim=0).clamp(min=1).unsqueeze(1)


def entropy(probabilities: Tensor) -> Tensor:
    """H in nats over the last axis."""
    return -(probabilities * probabilities.clamp(min=1e-9).log()).sum(dim=-1)


def routing_loss(gates: Tensor, languages: Tensor, count: int, weights: RoutingWeights) -> Tensor:
    """balance x (log N - H(E)) + concentration x H(E|L).

    The first term spreads the tokens of all languages over all N experts, the second keeps each language on few of
    them; with equal weights it is minus the mutual information I(E; L), up to a constant.
    """
    conditional = by_language(gates, languages, count)
    spread = torch.log(torch.tensor(float(gates.shape[1]))) - entropy(conditional.mean(dim=0))
    return weights.balance * spread + weights.concentration * entropy(conditional).mean()
