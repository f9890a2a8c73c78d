"""What each layer does to the hidden states of text, or to the loss: the less, the sooner it can be removed.

The states of a stack are x_0, before its first layer, to x_L, after its last. All means are over the real tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from prunecli.architectures.records import Side
from prunecli.errors import DataError, PruneError, UsageError
from prunecli.evaluation.on_text import model_and_batches
from prunecli.methods.options import LayerMetric
from prunecli.methods.units import TextRun
from prunecli.model.axes import axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.find_axes import axes_of
from prunecli.model.layout import ModelLayout
from prunecli.model.patchwork import module_name
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.progress import Progress, silent
from prunecli.results.document import LARGEST
from prunecli.results.unit_scores import Scores, scores_of
from prunecli.running.batches import TokenObserver, observe_batches, run_forward
from prunecli.running.examples import Batch
from prunecli.running.losses import require_finite, token_losses
from prunecli.running.runner import InMemory, Runner
from prunecli.running.vectors import batch_vectors
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
                "--metric embedding: the model translates, and makes no vector of a text.",
                "Choose another metric.",
            )
        pooling = read_pooling(checkpoint.path, run.say)
    model, batches = model_and_batches(
        checkpoint, data, run.running, run.say, predicting=metric == "perplexity", pooling=pooling
    )
    return layer_scores(checkpoint, InMemory(model), batches, metric, pooling, run.progress)


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
        pooling: how the vector of a text is made, for `embedding`.

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
    elif pooling is None:
        fields = _rises(checkpoint, runner, batches, progress)
    else:
        fields = _cosines(checkpoint, runner, batches, pooling, progress)
    return scores_of(
        checkpoint,
        kind="layer",
        method=metric,
        examples=sum(len(batch.indices) for batch in batches),
        ids={axis.name: axis.ids for axis in axes_of(checkpoint, "layer")},
        **fields,
    )


def _rises(
    checkpoint: Checkpoint, runner: Runner, batches: Sequence[Batch], progress: Progress
) -> dict[str, Any]:
    """Fields of `Scores`: how much the sum of the losses rises without each layer, and the number of tokens."""
    forward = partial(token_losses, runner.model)
    passes = _passes(checkpoint, runner, batches, forward, "the loss", progress)
    whole = next(passes)
    for batch, (losses, _) in zip(batches, whole, strict=True):
        require_finite(losses, batch)

    def nats(outputs: Sequence[Any]) -> float:
        return sum(float(losses.double().sum()) for losses, _ in outputs)

    base = nats(whole)
    rises = [nats(outputs) - base for outputs in passes]
    values = [rise if abs(rise) < LARGEST else LARGEST for rise in rises]
    tokens = sum(int(counts.sum()) for _, counts in whole)
    return {"per": "prediction", **_by_stack(checkpoint, values, max(tokens, 1))}


def _cosines(
    checkpoint: Checkpoint, runner: Runner, batches: Sequence[Batch], pooling: Pooling, progress: Progress
) -> dict[str, Any]:
    """Fields of `Scores`: sum of the cosines of each text's vector with its vector without each layer."""
    forward = partial(batch_vectors, runner.model, pooling)
    passes = _passes(checkpoint, runner, batches, forward, "the vectors", progress)
    vectors = (torch.cat([made.double().cpu() for made in outputs]) for outputs in passes)
    whole = next(vectors)
    if not whole.isfinite().all():
        raise DataError("a vector is not finite", "The weights are damaged, or overflow the type.")
    sums = [float(functional.cosine_similarity(without, whole).sum()) for without in vectors]
    # If no vector without a layer is finite, it counts as the farthest one.
    values = [own if np.isfinite(own) else -LARGEST for own in sums]
    return {"per": "example", **_by_stack(checkpoint, values, len(whole))}


def _by_stack(checkpoint: Checkpoint, values: Sequence[float], count: int) -> dict[str, Any]:
    """Fields of `Scores`: `[layers]` for each stack's axis, and what they are divided by."""
    found: dict[str, list[float]] = {}
    for layer, value in zip(checkpoint.layout.layers, values, strict=True):
        found.setdefault(axis_name(layer.side, "layer"), []).append(value)
    return {"values": found, "counts": dict.fromkeys(found, count)}


def _passes(
    checkpoint: Checkpoint,
    runner: Runner,
    batches: Sequence[Batch],
    forward: Callable[[Batch], Any],
    what: str,
    progress: Progress,
) -> Iterator[list[Any]]:
    """Yield what `forward` returns for each batch: of the whole model, then without each layer in turn."""
    layers = checkpoint.layout.layers
    total = (len(layers) + 1) * sum(len(batch.indices) for batch in batches)
    with progress(f"measuring {what} without each layer", total, "examples") as advance:

        def outputs() -> list[Any]:
            found = []

            def finish(batch: Batch, output: Any) -> int:
                found.append(output)
                advance(len(batch.indices))
                return 0

            run_forward(runner, batches, forward, finish)
            return found

        yield outputs()
        for layer in layers:
            with passed_by(runner.model.get_submodule(module_name(runner.model, layer.name))):
                without = outputs()
            yield without


@contextmanager
def passed_by(layer: nn.Module) -> Iterator[None]:
    """Within the block, the layer returns the hidden states that it is given; its other outputs stay as they are."""

    def hook(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
        states = _input(arguments, options)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    handle = layer.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _input(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor:
    """Hidden states that a layer is given."""
    states: Tensor = arguments[0] if arguments else options["hidden_states"]
    return states


class StateObserver(TokenObserver):
    """Sums what a metric needs of the states before and after each layer."""

    def __init__(self, layout: ModelLayout, metric: LayerMetric) -> None:
        self._layout, self._kind = layout, _Alignments if metric == "cka" else _Angles
        self._sums: dict[str, _Alignments | _Angles] = {}
        self._states: list[Tensor] = []

    def begin(self, batch: Batch, device: torch.device) -> None:
        """Forget the states of a pass that broke off."""
        self._states.clear()
        super().begin(batch, device)

    def hooks(self, model: Any) -> Iterator[RemovableHandle]:
        """Watch the input of each layer, and the output of the last one of each stack."""
        last = {layer.side: layer for layer in self._layout.layers}
        for layer in self._layout.layers:
            module = model.get_submodule(module_name(model, layer.name))
            hook = partial(self._add, layer.side, layer is last[layer.side])
            yield module.register_forward_hook(hook, with_kwargs=True)

    def take(self) -> dict[str, Any]:
        """Return the fields `values`, `counts` and `distances` of `Scores`.

        Raises:
            DataError: no token ran.
            PruneError: they are not finite.
        """
        if not all(own.tokens for own in self._sums.values()):
            raise DataError("no token to measure layers on", "Give text with at least one token.")
        fields: dict[str, dict[str, Any]] = {"values": {}, "counts": {}, "distances": {}}
        for side, own in self._sums.items():
            name, values = axis_name(side, "layer"), own.values()
            if not np.isfinite(values).all():
                raise PruneError(
                    f"The hidden states of the {side} are not finite, or the same for every token.",
                    "The weights are damaged, or overflow the type they are run in: use --metric last or random.",
                )
            fields["values"][name], fields["counts"][name] = values.tolist(), own.tokens
            if isinstance(own, _Angles):
                fields["distances"][name] = own.angles.tolist()
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
        if is_last:
            self._states.append(output[0] if isinstance(output, tuple) else output)
            sums = self._sums.setdefault(side, self._kind(len(self._states)))
            together = (state.to(self.mask.device).view(*self.mask.shape, -1) for state in self._states)
            sums.add([state[self.mask].float() for state in together])
            self._states.clear()


class _Angles:
    """Sums over tokens of cosines and angles between states, `[L + 1, L + 1]`."""

    def __init__(self, count: int) -> None:
        self.cosines, self.angles = np.zeros((count, count)), np.zeros((count, count))
        self.tokens = 0

    def add(self, states: list[Tensor]) -> None:
        """`[tokens, width]` each."""
        units = torch.stack([nn.functional.normalize(state, dim=-1) for state in states], dim=1)
        cosines = torch.einsum("tid,tjd->tij", units, units).double().clamp(-1, 1)
        self.cosines += cosines.sum(dim=0).cpu().numpy()
        self.angles += cosines.arccos().sum(dim=0).cpu().numpy() / np.pi
        self.tokens += len(units)

    def values(self) -> np.ndarray:
        """`[L]`: the sums of the cosines of neighbours."""
        return np.diagonal(self.cosines, 1)


class _Alignments:
    """Sums over tokens of the products X^T X of each state's features, and X^T Y of neighbours: 2 L + 1 matrices."""

    def __init__(self, count: int) -> None:
        self.sums: list[Any] = [0.0] * count
        self.own: list[Any] = [0.0] * count
        self.next: list[Any] = [0.0] * (count - 1)
        self.tokens = 0

    def add(self, states: list[Tensor]) -> None:
        """`[tokens, width]` each."""
        for place, state in enumerate(states):
            wide = state.double()
            self.sums[place] = self.sums[place] + wide.sum(dim=0)
            self.own[place] = self.own[place] + wide.T @ wide
            if place:
                self.next[place - 1] = self.next[place - 1] + states[place - 1].double().T @ wide
        self.tokens += len(states[0])

    def values(self) -> np.ndarray:
        """`[L]`: 1 - CKA of neighbours."""
        means = [total / self.tokens for total in self.sums]

        def square(products: Tensor, first: int, second: int) -> float:
            centred = products - self.tokens * torch.outer(means[first], means[second])
            return float(centred.square().sum())

        own = [square(products, place, place) for place, products in enumerate(self.own)]
        crossed = [square(products, place, place + 1) for place, products in enumerate(self.next)]
        with np.errstate(divide="ignore", invalid="ignore"):
            norms = np.sqrt(np.array(own[:-1]) * np.array(own[1:]))
            return np.asarray(1 - np.array(crossed) / norms)
