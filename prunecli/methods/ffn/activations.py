"""How active each hidden unit of an FFN is on text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prunecli.errors import PruneError
from prunecli.evaluation.on_text import model_and_batches
from prunecli.methods.sharing.hidden_units import output_layer
from prunecli.methods.units import TextRun
from prunecli.model.axes import Axis, axis_name, module_of
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.ffn import FfnLayer
from prunecli.model.patchwork import module_name
from prunecli.model.probe import outputs
from prunecli.modules.stock_experts import own_experts
from prunecli.modules.stock_names import StockNames
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


def measure_expert_activations(
    checkpoint: Checkpoint, data: Dataset, run: TextRun, *, axes: Sequence[Axis], metric: str = "activation"
) -> Scores:
    """Load the model of a mixture and sum the squared activations of its experts' hidden units on text.

    Their importance is the root of the mean of (g a_u)^2 over the real tokens that the router sends to the expert, for
    each hidden unit u: a_u is the input of the expert's output layer, g the weight that its output is multiplied by.
    Experts that serve every token have g = 1.

    Args:
        axes: hidden units of experts.

    Raises:
        DataError: no token.
        UnsupportedModelError: transformers does not let the experts be run from outside.
        PruneError: a model or text that cannot be used; an activation is not finite.
    """
    model, batches = model_and_batches(checkpoint, data, run.running, run.say)
    observer = ExpertUnitObserver(checkpoint, axes)
    observe_batches(InMemory(model), observer, batches, "activations", run.progress)
    return scores_of(
        checkpoint,
        kind="unit",
        method=metric,
        examples=sum(len(batch.indices) for batch in batches),
        per="token",
        **observer.take(),
    )


class ExpertUnitObserver(TokenObserver):
    """Sums the squared, weighted activations of experts' hidden units over real tokens.

    Args:
        checkpoint: the model's.
        axes: hidden units of experts.
    """

    def __init__(self, checkpoint: Checkpoint, axes: Sequence[Axis]) -> None:
        self._checkpoint = checkpoint
        self._layers = [layer for layer in checkpoint.require_mixtures() if not layer.is_predicting]
        self._always = {axis.name: axis for axis in axes}
        self._axes: dict[tuple[int, int], str] = {}
        for number, layer in enumerate(self._layers):
            stacked = {*layer.stacked_tensors}
            for axis in axes:
                experts = [
                    expert
                    for expert in range(layer.num_experts)
                    if layer.expert_prefix.format(expert=expert) == axis.module
                    or not stacked.isdisjoint(axis.carriers)
                ]
                self._axes |= {(number, expert): axis.name for expert in experts}
                if experts:
                    self._always.pop(axis.name, None)
        self._sums: dict[tuple[int, int] | str, Tensor] = {}
        self._tokens: dict[tuple[int, int] | str, int] = {}

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """See `Observer`."""
        with own_experts(model) as modules, super().watching(model):
            for number, module in enumerate(modules.values()):
                module.watcher = partial(self._routed, number)
            yield

    def hooks(self, model: Any) -> Iterator[RemovableHandle]:
        """Watch the input of the output layer of experts that serve every token."""
        names = StockNames(self._checkpoint, model)
        for axis in self._always.values():
            (output, *_) = outputs(axis.carriers)
            module = model.get_submodule(names.place(output).rpartition(".")[0])
            yield module.register_forward_pre_hook(partial(self._given, axis.name))

    def take(self) -> dict[str, Any]:
        """Return the fields `ids`, `values` and `counts` of `Scores`.

        Raises:
            PruneError: an activation was not finite.
        """
        sums: dict[str, Tensor] = {}
        counts = dict.fromkeys((*self._axes.values(), *self._always), 0)
        for place, own in self._sums.items():
            name = place if isinstance(place, str) else self._axes[place]
            sums[name] = sums[name] + own if name in sums else own
            counts[name] += self._tokens[place]
        for name in counts.keys() - sums.keys():  # an expert that no token was sent to
            sums[name] = torch.zeros_like(next(iter(sums.values())))
        return summed(sums, {name: max(count, 1) for name, count in counts.items()})

    def _routed(self, number: int, expert: int, hidden: Tensor, tokens: Tensor, weights: Tensor) -> None:
        real = self.mask.reshape(-1).to(tokens.device)[tokens]
        self._add((number, expert), (hidden * weights[:, None])[real])

    def _given(self, name: str, _module: Any, inputs: tuple[Tensor, ...]) -> None:
        units = inputs[0].view(*self.mask.shape, -1)
        self._add(name, units[self.mask.to(units.device)])

    def _add(self, place: tuple[int, int] | str, rows: Tensor) -> None:
        active = rows.float().square().sum(dim=0).double().cpu()
        self._sums[place] = self._sums[place] + active if place in self._sums else active
        self._tokens[place] = self._tokens.get(place, 0) + len(rows)
