"""How active each hidden unit of an FFN is on text: what decides which stay, by the activations that they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunecli.errors import PruneError
from prunecli.evaluation.on_text import RunOptions, model_and_batches
from prunecli.methods.ffn.hidden_units import output_layer
from prunecli.methods.ffn.names import UnitMetric
from prunecli.model.axes import axis_name, module_of
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.ffn import FfnLayer
from prunecli.model.patchwork import module_name
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.unit_scores import Scores, scores_of
from prunecli.running.batches import observe_batches
from prunecli.running.examples import Batch
from prunecli.running.runner import InMemory
from prunecli.text.choice import Dataset


def measure_activations(
    checkpoint: Checkpoint,
    data: Dataset,
    options: RunOptions,
    progress: Progress = silent,
    say: Say = unsaid,
    method: UnitMetric = "activation",
) -> Scores:
    """Load the model of a checkpoint and sum the squared activations of its hidden units on text.

    Their importance is the root of the mean of a_u^2 over the real tokens, for each hidden unit u of each FFN. A unit
    that is large on a few tokens counts more than in the mean of |a_u|: such units carry what a language model does at
    its first token, and removing them costs most.

    a_u is what the output layer weighs: act(x W1 + b1)_u, in a gated FFN times its gate. Where several layers run one
    FFN, the sum is over all of them.

    Raises:
        DataError: no token.
        PruneError: a model or text that cannot be used; an activation is not finite.
    """
    model, batches = model_and_batches(checkpoint, data, options, say)
    observer = UnitObserver(checkpoint.layout.ffns)
    observe_batches(InMemory(model), observer, batches, "activations", progress)
    return scores_of(
        checkpoint,
        kind="unit",
        method=method,
        examples=sum(len(batch.indices) for batch in batches),
        per="token",
        **observer.take(),
    )


class UnitObserver:
    """Sums the squared activations of hidden units over real tokens: an `Observer`.

    Args:
        layers: the FFNs of the checkpoint.
    """

    _mask: Tensor
    """`[batch, length]` bool: which tokens of the stack that runs are no padding."""

    def __init__(self, layers: Sequence[FfnLayer]) -> None:
        self._layers = layers
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}

    def begin(self, batch: Batch, device: torch.device) -> None:
        """What runs next; its encoder, or only stack, first."""
        self._mask = batch.inputs["attention_mask"].bool().to(device)
        self._decoder_mask = batch.inputs.get("decoder_attention_mask", self._mask).bool().to(device)

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """See `Observer`."""
        with ExitStack() as hooks:
            if model.config.is_encoder_decoder:
                hooks.callback(model.get_decoder().register_forward_pre_hook(self._decode).remove)
            for layer in self._layers:
                if not (layer.removed or layer.is_sparse or layer.is_shared):
                    name = module_name(model, f"{layer.name}.{output_layer(layer.tensors)}")
                    hook = partial(self._add, layer.name)
                    hooks.callback(model.get_submodule(name).register_forward_pre_hook(hook).remove)
            yield

    def take(self) -> dict[str, Any]:
        """The fields `ids`, `values` and `counts` of `Scores`, since the last call.

        Raises:
            PruneError: an activation was not finite.
        """
        values = {axis_name(name, "unit"): sums.tolist() for name, sums in self._sums.items()}
        counts = {axis_name(name, "unit"): count for name, count in self._tokens.items()}
        self._sums, self._tokens = {}, {}
        for name, own in values.items():
            if not np.isfinite(own).all():
                raise PruneError(
                    f"{module_of(name)}: the activation of a hidden unit is not finite.",
                    "The weights are damaged, or overflow the type they are run in: choose by norms.",
                )
        ids = {name: list(range(len(own))) for name, own in values.items()}
        return {"ids": ids, "values": values, "counts": counts}

    def _decode(self, *_: Any) -> None:
        self._mask = self._decoder_mask

    def _add(self, name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # OPT's are of all tokens, one sentence behind another.
        units = inputs[0].view(*self._mask.shape, -1)
        active = units[self._mask.to(units.device)].float().square().sum(dim=0).double()
        self._sums[name] = self._sums[name] + active if name in self._sums else active
        self._tokens[name] = self._tokens.get(name, 0) + int(self._mask.sum())
