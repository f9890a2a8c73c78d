"""How active each hidden unit of an FFN, or of an expert, is on text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from prunecli.errors import PruneError
from prunecli.evaluation.on_text import runner_and_batches
from prunecli.methods.units import TextRun, units_of_experts
from prunecli.model.axes import Axis, axis_name, module_of
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.parts import FfnLayer
from prunecli.model.patchwork import submodule
from prunecli.model.probe import outputs
from prunecli.modules.stock_experts import own_experts
from prunecli.modules.stock_names import StockNames
from prunecli.results.unit_scores import Scores, scores_of
from prunecli.running.batches import TokenObserver, observe_batches
from prunecli.running.examples import num_examples
from prunecli.running.runner import REHEARSING
from prunecli.text.choice import Dataset


def measure_activations(
    checkpoint: Checkpoint,
    data: Dataset,
    run: TextRun,
    metric: str = "activation",
    experts: Sequence[Axis] = (),
) -> Scores:
    """Load the model of a checkpoint and sum the squared activations of its hidden units on text.

    Their importance is the root of the mean of a_u^2 over the real tokens, for each hidden unit u of each FFN. A unit
    that is large on a few tokens counts more than in the mean of |a_u|: such units carry what a language model does at
    its first token, and removing them costs most.

    a_u is the input of the output layer: act(x W1 + b1)_u, in a gated FFN times its gate. If several layers run one
    FFN, the sum is over all of them. In an expert the mean is that of (g a_u)^2 over the real tokens that the router
    sends to it, g being the weight that its output is multiplied by; experts that serve every token have g = 1.

    Args:
        metric: the method that the scores name.
        experts: hidden units of experts, which are measured in the place of those of dense FFNs.

    Raises:
        DataError: no token.
        UnsupportedModelError: transformers does not let the experts be run from outside.
        PruneError: a model or text that cannot be used; an activation is not finite.
    """
    ffns = checkpoint.layout.ffns
    observer = ExpertUnitObserver(checkpoint, experts) if experts else UnitObserver(ffns)
    runner, batches = runner_and_batches(checkpoint, data, run.running, run.say, whole=bool(experts))
    observe_batches(runner, observer, batches, "activations", run.progress)
    examples, fields = num_examples(batches), observer.take()
    return scores_of(checkpoint, kind="unit", method=metric, examples=examples, per="token", **fields)


class UnitObserver(TokenObserver):
    """Sums the squared activations of hidden units over real tokens.

    Args:
        layers: the FFNs of the checkpoint.
    """

    def __init__(self, layers: Sequence[FfnLayer] = ()) -> None:
        self._layers = layers
        self._sums: dict[Hashable, Any] = defaultdict(int)
        self._tokens: Counter[Hashable] = Counter()

    def hooks(self, model: Any) -> Iterator[RemovableHandle]:
        """Watch the input of each output layer."""
        for layer in self._layers:
            if layer.has_tensors and not layer.is_sparse:
                output = submodule(model, layer.output)
                hook = partial(self._given, axis_name(layer.name, "unit"), 1)
                yield output.register_forward_pre_hook(hook)

    def sums(self) -> dict[Any, tuple[Tensor, int]]:
        """Name of an axis -> sums `[units]`, and number of tokens."""
        return {name: (own, self._tokens[name]) for name, own in self._sums.items()}

    def take(self) -> dict[str, Any]:
        """Return the fields `ids`, `values` and `counts` of `Scores`.

        Raises:
            PruneError: an activation was not finite.
        """
        fields: dict[str, dict[str, Any]] = {"ids": {}, "values": {}, "counts": {}}
        for name, (own, tokens) in self.sums().items():
            values = own.tolist()
            if not np.isfinite(values).all():
                raise PruneError(
                    f"{module_of(name)}: the activation of a hidden unit is not finite.",
                    "The weights are damaged, or overflow the type they are run in: choose by norms.",
                )
            fields["ids"][name], fields["values"][name] = [*range(len(values))], values
            fields["counts"][name] = tokens
        return fields

    def _given(self, name: str, blocks: int, _module: Any, inputs: tuple[Tensor, ...]) -> None:
        if REHEARSING.get():
            return
        rows = self.real(inputs[0])
        # Of several experts that serve every token, side by side, each has every unit.
        self._add(name, rows.reshape(-1, rows.shape[-1] // blocks))

    def _add(self, place: Hashable, rows: Tensor) -> None:
        self._sums[place] += rows.float().square().sum(dim=0).double()
        self._tokens[place] += len(rows)


class ExpertUnitObserver(UnitObserver):
    """Sums the squared, weighted activations of experts' hidden units over real tokens.

    Args:
        checkpoint: the model's.
        axes: hidden units of experts.
    """

    def __init__(self, checkpoint: Checkpoint, axes: Sequence[Axis]) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._axes: dict[Any, str] = units_of_experts(checkpoint, axes)
        self._units = axes

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
        routed = {*self._axes.values()}
        for axis in (axis for axis in self._units if axis.name not in routed):
            (output, *_) = outputs(axis.carriers)
            module = model.get_submodule(module_of(names.place(output)))
            blocks = len(axis.carriers[output].blocks)
            yield module.register_forward_pre_hook(partial(self._given, axis.name, blocks))

    def sums(self) -> dict[Any, tuple[Tensor, int]]:
        """See `UnitObserver`; an expert that no token was sent to has zeros, and counts one token."""
        found = {axis.name: (torch.zeros(axis.count, dtype=torch.float64), 0) for axis in self._units}
        for place, own in self._sums.items():
            name = self._axes.get(place, place)
            before, tokens = found[str(name)]
            found[str(name)] = before + own.cpu(), tokens + self._tokens[place]
        return {name: (own, max(tokens, 1)) for name, (own, tokens) in found.items()}

    def _routed(self, number: int, expert: int, hidden: Tensor, tokens: Tensor, weights: Tensor) -> None:
        real = self.mask.reshape(-1).to(tokens.device)[tokens]
        self._add((number, expert), (hidden * weights[:, None])[real])
