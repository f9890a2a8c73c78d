"""How active each hidden unit of an FFN is on text: what decides which stay, by the activations that they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prunecli.errors import DataError, PruneError
from prunecli.evaluation.on_text import RunOptions, model_and_batches
from prunecli.methods.ffn.rewrite import output_layer
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.ffn import FfnLayer
from prunecli.modules.attention import module_name
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.running.examples import Batch
from prunecli.text.choice import Dataset


def measure_activations(
    checkpoint: Checkpoint,
    data: Dataset,
    options: RunOptions,
    progress: Progress = silent,
    say: Say = unsaid,
) -> dict[str, NDArray[np.float64]]:
    """Load the model of a checkpoint and run it on text: see `unit_activations`.

    Raises:
        PruneError: a model or text that cannot be used.
    """
    model, batches = model_and_batches(checkpoint, data, options, say)
    return unit_activations(model, checkpoint.layout.ffns, batches, progress)


def unit_activations(
    model: Any, layers: Sequence[FfnLayer], batches: Sequence[Batch], progress: Progress = silent
) -> dict[str, NDArray[np.float64]]:
    """Mean over the real tokens of |a_u|, for each hidden unit u of each FFN.

    a_u is what the output layer weighs: act(x W1 + b1)_u, in a gated FFN times its gate. Where several layers run one
    FFN, the mean is over all of them.

    Args:
        model: what `load_model` made, in evaluation mode.
        layers: the FFNs of its checkpoint.
        batches: of text; padding is left out by their masks.

    Returns:
        Name of each dense FFN that holds tensors -> `[width]`.

    Raises:
        DataError: no token.
        PruneError: an activation is not finite.
    """
    if not batches:
        raise DataError("no text to measure activations on", "Give text with at least one line.")
    total = sum(len(batch.indices) for batch in batches)
    with (
        torch.no_grad(),
        _watched(model, layers) as watch,
        progress("measuring activations", total, "examples") as advance,
    ):
        for batch in batches:
            inputs = batch.arguments(model.base_model)
            watch.real = watch.encoder_real = inputs["attention_mask"].bool()
            watch.decoder_real = inputs.get("decoder_attention_mask", watch.real).bool()
            model.base_model(**inputs)
            advance(len(batch.indices))
    found = {name: sums.cpu().numpy() / watch.tokens[name] for name, sums in watch.sums.items()}
    for name, values in found.items():
        if not np.isfinite(values).all():
            raise PruneError(
                f"{name}: the activation of a hidden unit is not finite.",
                "The weights are damaged, or overflow the type they are run in: use --keep-units norms.",
            )
    return found


class _Watch:
    """Sums that grow with each forward pass.

    Attributes:
        sums: FFN -> `[width]` float64, the sum of |a| over tokens.
        tokens: FFN -> how many tokens.
        real: `[batch, length]`, which tokens of the stack that runs are no padding.
    """

    real: Tensor
    encoder_real: Tensor
    decoder_real: Tensor

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.tokens: dict[str, int] = {}

    def decoding(self, *_: Any) -> None:
        """The decoder begins."""
        self.real = self.decoder_real

    def add(self, name: str) -> Any:
        """A hook of the output layer of an FFN."""

        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            units = inputs[0].view(
                *self.real.shape, -1
            )  # OPT's are of all tokens, one sentence behind another
            active = units[self.real].abs().sum(dim=0, dtype=torch.float32).double()
            self.sums[name] = self.sums[name] + active if name in self.sums else active
            self.tokens[name] = self.tokens.get(name, 0) + int(self.real.sum())

        return hook


@contextmanager
def _watched(model: Any, layers: Sequence[FfnLayer]) -> Iterator[_Watch]:
    watch = _Watch()
    with ExitStack() as hooks:
        if model.config.is_encoder_decoder:
            hooks.callback(model.get_decoder().register_forward_pre_hook(watch.decoding).remove)
        for layer in layers:
            if not (layer.removed or layer.is_sparse or layer.is_shared):
                name = module_name(model, f"{layer.name}.{output_layer(layer.tensors)}")
                module = model.get_submodule(name)
                hooks.callback(module.register_forward_pre_hook(watch.add(layer.name)).remove)
        yield watch
