"""What the demo's training minimises beside the cross-entropy: how tokens spread over experts, and by language."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
            module.router["classifier"].register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def keep(_module: Any, _inputs: Any, logits: Tensor) -> None:
            self.by_layer[name] = torch.softmax(logits, dim=-1)

        return keep


@dataclass(frozen=True)
class RoutingGoals:
    """How tokens should spread over a layer's experts.

    Attributes:
        weight: of the routing loss beside the cross-entropy, per sparse layer.
        experts_per_language: effective number of experts, exp(H), that one language may use without penalty.
        experts_per_family: the same for the two languages of a family together.
    """

    weight: float
    experts_per_language: float
    experts_per_family: float


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


def routing_loss(gates: Tensor, languages: Tensor, families: Sequence[int], goals: RoutingGoals) -> Tensor:
    """weight x (log N - H(E) + max(0, H(E|L) - log k_L) + max(0, H(E|F) - log k_F)), p(e) from mean gate values.

    The first term spreads the tokens of all languages evenly over all N experts (load balance). The other two keep
    each language L, and each family F, on few of them: with the first they raise the mutual information between
    experts and languages, while sisters may share. NLLB-200 is trained with load balance alone; these two terms are
    the demo's own.

    Args:
        gates: `[tokens, num_experts]`.
        languages: `[tokens]` index of each token's language.
        families: family index of each language.
        goals: weight and the two numbers of experts.
    """
    per_language = by_language(gates, languages, len(families))
    members = torch.nn.functional.one_hot(torch.tensor(families)).to(gates.dtype)
    per_family = members.T @ per_language / members.sum(dim=0).unsqueeze(1)
    unbalanced = math.log(gates.shape[1]) - entropy(per_language.mean(dim=0))
    over_language = (entropy(per_language) - math.log(goals.experts_per_language)).clamp(min=0).mean()
    over_family = (entropy(per_family) - math.log(goals.experts_per_family)).clamp(min=0).mean()
    return goals.weight * (unbalanced + over_language + over_family)
