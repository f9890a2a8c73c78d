"""What each layer does to the hidden states of text, or to the loss: the less, the sooner it can be removed.

The states of a stack are x_0, before its first layer, to x_L, after its last. All means are over the real tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from prunecli.architectures.records import Side
from prunecli.errors import DataError, PruneError, UsageError
from prunecli.evaluation.on_text import runner_and_batches
from prunecli.methods.options import LayerMetric
from prunecli.methods.units import TextRun
from prunecli.model.axes import axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.find_axes import axes_of
from prunecli.model.layout import ModelLayout
from prunecli.model.patchwork import submodule
from prunecli.modules.hooks import states_of
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.progress import Progress, silent
from prunecli.results.document import LARGEST
from prunecli.results.unit_scores import Scores, scores_of
from prunecli.running.batches import (
    TokenObserver,
    batch_vectors,
    observe_batches,
    require_finite,
    token_losses,
)
from prunecli.running.examples import Batch, num_examples
from prunecli.running.runner import Runner
from prunecli.text.choice import Dataset
from prunecli.text.parallel import ParallelText


def measure_layers(checkpoint: Checkpoint, data: Dataset, run: TextRun, metric: LayerMetric) -> Scores:
    """Load the model of a checkpoint and score its layers on text, see `layer_scores`.

    Raises:
        UsageError: vectors are asked for of a model that translates.
        PruneError: a model or text that cannot be used.
    """
    pooling = None
    if metric == "embedding":
        if isinstance(data.text, ParallelText):
            raise UsageError(
                "`metric=embedding`: the model translates, and makes no vector of a text.",
                "Choose another metric.",
            )
        pooling = read_pooling(checkpoint.path, run.say)
    runner, batches = runner_and_batches(
        checkpoint, data, run.running, run.say, predicting=metric == "perplexity", pooling=pooling, whole=True
    )
    return layer_scores(checkpoint, runner, batches, metric, pooling, run.progress)


def layer_scores(
    checkpoint: Checkpoint,
    runner: Runner,
    batches: Sequence[Batch],
    metric: LayerMetric,
    pooling: Pooling | None = None,
    progress: Progress = silent,
) -> Scores:
    """Score the layers of a model on batches of text; padding is left out.

    By `cosine` a layer's score is 1 - mean cos(x_l, x_(l+1)) (ShortGPT's block influence, 2403.03853), and the
    distance of layers i and j is mean arccos(cos(x_i, x_j)) / pi (2403.17887, 3.2, there of the last token alone).
    By `cka` it is 1 - linear CKA (1905.00414) of x_l and x_(l+1), tokens being the examples.

    By `perplexity` it is ln(perplexity without the layer / perplexity), by `embedding` the mean over the texts of
    1 - cos(vector without the layer, vector): each layer is passed by in turn.

    Args:
        runner: a runner of a model that is held whole.
        pooling: pooling of the vector of a text, for `embedding`.

    Raises:
        DataError: no text or token, or a loss or vector of the whole model that is not finite.
        PruneError: a state is not finite.
    """
    if metric in ("cosine", "cka"):
        observer = StateObserver(checkpoint.layout, metric)
        observe_batches(runner, observer, batches, "layers", progress)
        fields = {"per": "token", **observer.take()}
    elif not batches:
        raise DataError("no text to measure layers on", "Give text with at least one line.")
    else:
        fields = _by_passing(checkpoint, runner, batches, pooling, progress)
    return scores_of(
        checkpoint,
        kind="layer",
        method=metric,
        examples=num_examples(batches),
        ids={axis.name: axis.ids for axis in axes_of(checkpoint, "layer")},
        **fields,
    )


def _by_passing(
    checkpoint: Checkpoint,
    runner: Runner,
    batches: Sequence[Batch],
    pooling: Pooling | None,
    progress: Progress,
) -> dict[str, Any]:
    """Fields of `Scores`: sums over the text of the model without each layer.

    Without a pooling, the rise of the losses, and the number of tokens; else the cosine of each text's vector with its
    vector without the layer, and the number of texts.
    """
    model, layers, by_loss = runner.model, checkpoint.layout.layers, pooling is None
    forward = partial(token_losses, model) if pooling is None else partial(batch_vectors, model, pooling)
    what, total = "the loss" if by_loss else "the vectors", num_examples(batches)
    found: dict[str, list[float]] = {}
    with (
        torch.inference_mode(),
        progress(f"measuring {what} without each layer", (len(layers) + 1) * total, "examples") as advance,
    ):

        def run() -> Iterator[Any]:
            """Yield the losses and their counts, or the vectors, of each batch."""
            for batch in batches:
                yield forward(batch)
                advance(len(batch.indices))

        whole, count = [*run()], total
        if by_loss:
            for batch, (losses, _) in zip(batches, whole, strict=True):
                require_finite(losses, batch)
            count = max(sum(int(counts.sum()) for _, counts in whole), 1)
        elif not all(vectors.isfinite().all() for vectors in whole):
            raise DataError("a vector is not finite", "The weights are damaged, or overflow the type.")
        for layer in layers:
            value = 0.0
            with passed_by(submodule(model, layer.name)):
                for made, before in zip(run(), whole, strict=True):
                    if by_loss:
                        value += float((made[0].double() - before[0].double()).sum())
                    else:
                        value += float(functional.cosine_similarity(made.double(), before.double()).sum())
            # Without the layer no loss or vector may be finite: then it counts as the worst value.
            worst = LARGEST if by_loss else -LARGEST
            sane = value if abs(value) < LARGEST else worst
            found.setdefault(axis_name(layer.side, "layer"), []).append(sane)
    return {
        "per": "prediction" if by_loss else "example",
        "values": found,
        "counts": dict.fromkeys(found, count),
    }


def passed_by(layer: nn.Module) -> RemovableHandle:
    """Within the block, the layer returns the hidden states that it is given; its other outputs stay as they are."""

    def hook(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
        states = _input(arguments, options)
        return (states, *output[1:]) if isinstance(output, tuple | list) else states

    return layer.register_forward_hook(hook, with_kwargs=True)


def _input(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor:
    """Hidden states that a layer is given."""
    states: Tensor = arguments[0] if arguments else options["hidden_states"]
    return states


class StateObserver(TokenObserver):
    """Sums over tokens of the products of the states before and after each layer."""

    def __init__(self, layout: ModelLayout, metric: LayerMetric) -> None:
        self._layout, self._is_cka = layout, metric == "cka"
        self._sums: dict[str, list[Tensor]] = {}
        self._tokens: Counter[str] = Counter()
        self._states: list[Tensor] = []

    def begin(self, batch: Batch, device: torch.device) -> None:
        """Forget the states of a pass that broke off."""
        self._states.clear()
        super().begin(batch, device)

    def hooks(self, model: Any) -> Iterator[RemovableHandle]:
        """Watch the input of each layer, and the output of the last one of each stack."""
        last = {layer.side: layer for layer in self._layout.layers}
        for layer in self._layout.layers:
            module = submodule(model, layer.name)
            hook = partial(self._add, layer.side, layer is last[layer.side])
            yield module.register_forward_hook(hook, with_kwargs=True)

    def take(self) -> dict[str, Any]:
        """Return the fields `values`, `counts` and `distances` of `Scores`.

        Raises:
            DataError: no token ran.
            PruneError: they are not finite.
        """
        if not all(self._tokens.values()):
            raise DataError("no token to measure layers on", "Give text with at least one token.")
        fields: dict[str, dict[str, Any]] = {"values": {}, "counts": {}, "distances": {}}
        for side, sums in self._sums.items():
            name, tokens = axis_name(side, "layer"), self._tokens[side]
            values = _alignment(sums, tokens) if self._is_cka else np.diagonal(sums[0].cpu().numpy(), 1)
            if not np.isfinite(values).all():
                raise PruneError(
                    f"The hidden states of the {side} are not finite, or the same for every token.",
                    "The weights are damaged, or overflow the type they are run in: use `metric=last` or random.",
                )
            fields["values"][name], fields["counts"][name] = values.tolist(), tokens
            if not self._is_cka:
                fields["distances"][name] = (sums[1] / np.pi).tolist()
        return fields

    def _add(
        self,
        side: Side,
        is_last: bool,
        _: nn.Module,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        output: Any,
    ) -> None:
        self._states.append(_input(arguments, options))
        if not is_last:
            return
        self._states.append(states_of(output))
        device = self.mask.device
        states = torch.stack([self.real(state).to(device).float() for state in self._states])
        self._states.clear()
        made = _products(states) if self._is_cka else _angles(states)
        before = self._sums.get(side)
        self._sums[side] = (
            made if before is None else [old + new for old, new in zip(before, made, strict=True)]
        )
        self._tokens[side] += states.shape[1]


def _angles(states: Tensor) -> list[Tensor]:
    """Sums over tokens of the cosines and the angles between states, `[L + 1, L + 1]` each.

    Args:
        states: `[L + 1, tokens, width]`.
    """
    units = nn.functional.normalize(states, dim=-1)
    cosines = torch.einsum("itd,jtd->tij", units, units).double().clamp(-1, 1)
    return [cosines.sum(dim=0), cosines.arccos().sum(dim=0)]


def _products(states: Tensor) -> list[Tensor]:
    """Sums over tokens: X `[L + 1, width]`, X^T X `[L + 1, width, width]`, X^T Y of neighbours `[L, width, width]`."""
    own = torch.stack([one.double().T @ one.double() for one in states])
    crossed = torch.stack([one.double().T @ other.double() for one, other in pairwise(states)])
    return [states.sum(dim=1, dtype=torch.float64), own, crossed]


def _alignment(sums: Sequence[Tensor], tokens: int) -> np.ndarray:
    """`[L]`: 1 - CKA of neighbours, from the sums of `_products`."""
    total, own, crossed = sums
    means = total / tokens

    def squares(products: Tensor, first: Tensor, second: Tensor) -> Tensor:
        centred = products - tokens * torch.einsum("li,lj->lij", first, second)
        return centred.square().sum(dim=(1, 2))

    norms = squares(own, means, means)
    found = 1 - squares(crossed, means[:-1], means[1:]) / (norms[:-1] * norms[1:]).sqrt()
    return np.asarray(found.cpu().numpy())
