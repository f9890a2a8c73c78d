"""What layers returned, kept from the way forwards to the way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.modules.trees import leaves, map_tree
from prunecli.running.layerwise.states import StateStore, Stored


@dataclass(frozen=True)
class Kept:
    """A tensor that a layer returned.

    Attributes:
        held: where it is.
        differentiable: whether what is differentiated by takes part in it.
    """

    held: Stored
    differentiable: bool


class Tape:
    """Outputs of layers as trees of `Kept`; a tensor that a layer hands on as it got it is kept once.

    Args:
        states: where they are kept.
        device: where they are given back.
    """

    def __init__(self, states: StateStore, device: torch.device) -> None:
        self._states, self._device = states, device
        self._uses: Counter[Stored] = Counter()

    def keep(self, output: Any, given: Mapping[Side, Any], kept: Mapping[Side, Any]) -> Any:
        """Keep a layer's output.

        Args:
            given: what the layer got, by side.
            kept: what that was fetched from.
        """
        known = {
            id(tensor): one
            for side, tree in given.items()
            for tensor, one in zip(leaves(tree, Tensor), leaves(kept[side], Kept), strict=True)
        }

        def put(tensor: Tensor) -> Kept:
            found = known.get(id(tensor)) or Kept(self._states.put(tensor.detach()), tensor.requires_grad)
            self._uses[found.held] += 1
            return found

        return map_tree(output, put, Tensor)

    def fetch(self, tree: Any) -> Any:
        """The output again, its tensors the leaves of a new graph."""

        def get(one: Kept) -> Tensor:
            return self._states.get(one.held).to(self._device).requires_grad_(one.differentiable)

        return map_tree(tree, get, Kept)

    def drop(self, tree: Any) -> None:
        """Give the room of what nobody else needs back."""
        for one in leaves(tree, Kept):
            self._uses[one.held] -= 1
            if not self._uses[one.held]:
                del self._uses[one.held]
                self._states.drop(one.held)
