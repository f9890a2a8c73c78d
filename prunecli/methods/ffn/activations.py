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
from prunecli.methods.ffn.score import UnitActivations
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.ffn import FfnLayer
from prunecli.modules.attention import module_name
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.running.batches import observe_batches
from prunecli.running.examples import Batch
from prunecli.running.runner import InMemory, Runner
from prunecli.text.choice import Dataset


def measure_activations(
    checkpoint: Checkpoint,
    data: Dataset,
    options: RunOptions,
    progress: Progress = silent,
    say: Say = unsaid,
) -> UnitActivations:
    """Load the model of a checkpoint and run it on text: see `unit_activations`.

    Raises:
        PruneError: a model or text that cannot be used.
    """
    model, batches = model_and_batches(checkpoint, data, options, say)
    return unit_activations(InMemory(model), checkpoint.layout.ffns, batches, progress)


def unit_activations(
    runner: Runner, layers: Sequence[FfnLayer], batches: Sequence[Batch], progress: Progress = silent
) -> UnitActivations:
    """Root of the mean of a_u^2 over the real tokens, for each hidden unit u of each FFN.

    A unit that is large on a few tokens counts more than in the mean of |a_u|: such units carry what a language model
    does at its first token, and removing them costs most.

    a_u is what the output layer weighs: act(x W1 + b1)_u, in a gated FFN times its gate. Where several layers run one
    FFN, the mean is over all of them.

    Args:
        runner: of a model that is held whole.
        layers: the FFNs of its checkpoint.
        batches: of text; padding is left out by their masks.

    Raises:
        DataError: no token.
        PruneError: an activation is not finite.
    """
    observer = UnitObserver(layers)
    observe_batches(runner, observer, batches, "activations", progress)
    return observer.take()


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

    def take(self) -> UnitActivations:
        """The root mean squares since the last call.

        Raises:
            PruneError: an activation was not finite.
        """
        magnitudes = {
            name: np.sqrt(sums.cpu().numpy() / self._tokens[name]) for name, sums in self._sums.items()
        }
        tokens, self._sums, self._tokens = self._tokens, {}, {}
        for name, values in magnitudes.items():
            if not np.isfinite(values).all():
                raise PruneError(
                    f"{name}: the activation of a hidden unit is not finite.",
                    "The weights are damaged, or overflow the type they are run in: choose by norms.",
                )
        return UnitActivations(magnitudes, tokens)

    def _decode(self, *_: Any) -> None:
        self._mask = self._decoder_mask

    def _add(self, name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # OPT's are of all tokens, one sentence behind another.
        units = inputs[0].view(*self._mask.shape, -1)
        active = units[self._mask.to(units.device)].float().square().sum(dim=0).double()
        self._sums[name] = self._sums[name] + active if name in self._sums else active
        self._tokens[name] = self._tokens.get(name, 0) + int(self._mask.sum())
