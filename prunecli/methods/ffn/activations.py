"""How active each hidden unit of an FFN is on text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prunecli.errors import PruneError
from prunecli.evaluation.on_text import model_and_batches
from prunecli.methods.sharing.hidden_units import output_layer
from prunecli.methods.units import TextRun
from prunecli.model.axes import axis_name, module_of
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.ffn import FfnLayer
from prunecli.model.patchwork import module_name
from prunecli.results.unit_scores import Scores, scores_of
from prunecli.running.batches import TokenObserver, observe_batches
from prunecli.running.runner import InMemory
from prunecli.text.choice import Dataset


def measure_activations(
    checkpoint: Checkpoint, data: Dataset, run: TextRun, metric: str = "activation"
) -> Scores:
    """Load the model of a checkpoint and sum the squared activations of its hidden units on text.

    Their importance is the root of the mean of a_u^2 over the real tokens, for each hidden unit u of each FFN. A unit
    that is large on a few tokens counts more than in the mean of |a_u|: such units carry what a language model does at
    its first token, and removing them costs most.

    a_u is the input of the output layer: act(x W1 + b1)_u, in a gated FFN times its gate. If several layers run one
    FFN, the sum is over all of them.

    Raises:
        DataError: no token.
        PruneError: a model or text that cannot be used; an activation is not finite.
    """
    model, batches = model_and_batches(checkpoint, data, run.running, run.say)
    observer = UnitObserver(checkpoint.layout.ffns)
    observe_batches(InMemory(model), observer, batches, "activations", run.progress)
    return scores_of(
        checkpoint,
        kind="unit",
        method=metric,
        examples=sum(len(batch.indices) for batch in batches),
        per="token",
        **observer.take(),
    )


class UnitObserver(TokenObserver):
    """Sums the squared activations of hidden units over real tokens.

    Args:
        layers: the FFNs of the checkpoint.
    """

    def __init__(self, layers: Sequence[FfnLayer]) -> None:
        self._layers = layers
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}

    def hooks(self, model: Any) -> Iterator[RemovableHandle]:
        """Watch the input of each output layer."""
        for layer in self._layers:
            if not (layer.removed or layer.is_sparse or layer.is_shared):
                name = module_name(model, f"{layer.name}.{output_layer(layer.tensors)}")
                hook = partial(self._add, axis_name(layer.name, "unit"))
                yield model.get_submodule(name).register_forward_pre_hook(hook)

    def take(self) -> dict[str, Any]:
        """Return the fields `ids`, `values` and `counts` of `Scores`.

        Raises:
            PruneError: an activation was not finite.
        """
        return summed(self._sums, self._tokens)

    def _add(self, name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # OPT's are of all tokens, one sentence behind another.
        units = inputs[0].view(*self.mask.shape, -1)
        active = units[self.mask.to(units.device)].float().square().sum(dim=0).double()
        self._sums[name] = self._sums[name] + active if name in self._sums else active
        self._tokens[name] = self._tokens.get(name, 0) + int(self.mask.sum())


def summed(sums: Mapping[str, Tensor], tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields `ids`, `values` and `counts` of `Scores`.

    Args:
        sums: name of an axis -> `[units]`.
        tokens: name of an axis -> number of tokens.

    Raises:
        PruneError: a sum is not finite.
    """
    values = {name: own.tolist() for name, own in sums.items()}
    for name, own in values.items():
        if not np.isfinite(own).all():
            raise PruneError(
                f"{module_of(name)}: the activation of a hidden unit is not finite.",
                "The weights are damaged, or overflow the type they are run in: choose by norms.",
            )
    ids = {name: list(range(len(own))) for name, own in values.items()}
    return {"ids": ids, "values": values, "counts": dict(tokens)}
