"""What each layer does to the hidden states of text, or to the loss: the less, the sooner it can go.

The states of a stack are x_0, before its first layer, to x_L, after its last. All means are over the real tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from prunecli.architectures.records import Side
from prunecli.errors import DataError, PruneError, UsageError
from prunecli.evaluation.on_text import RunOptions, model_and_batches
from prunecli.methods.layers.names import LayerMetric
from prunecli.model.axes import axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.find_axes import axes_of
from prunecli.model.layout import ModelLayout
from prunecli.model.patchwork import module_name
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.document import LARGEST
from prunecli.results.unit_scores import Scores, scores_of
from prunecli.running.batches import observe_batches, run_forward
from prunecli.running.examples import Batch
from prunecli.running.losses import require_finite, token_losses
from prunecli.running.runner import InMemory, Runner
from prunecli.running.vectors import batch_vectors
from prunecli.text.choice import Dataset
from prunecli.text.parallel import ParallelText


def measure_layers(
    checkpoint: Checkpoint,
    data: Dataset,
    options: RunOptions,
    metric: LayerMetric,
    progress: Progress = silent,
    say: Say = unsaid,
) -> Scores:
    """Load the model of a checkpoint and run it on text: see `state_scores`, `losses_without` and `moves_without`.

    Raises:
        UsageError: vectors are asked for of a model that translates.
        PruneError: a model or text that cannot be used.
    """
    if metric == "embedding":
        if isinstance(data.text, ParallelText):
            raise UsageError(
                "--metric embedding: the model translates, and makes no vector of a text.",
                "Choose another metric.",
            )
        pooling = read_pooling(checkpoint.path, say)
        model, batches = model_and_batches(checkpoint, data, options, say, pooling=pooling)
        return moves_without(checkpoint, InMemory(model), batches, pooling, progress)
    predicting = metric == "perplexity"
    model, batches = model_and_batches(checkpoint, data, options, say, predicting=predicting)
    if predicting:
        return losses_without(checkpoint, InMemory(model), batches, progress)
    return state_scores(checkpoint, InMemory(model), batches, metric, progress)


def state_scores(
    checkpoint: Checkpoint,
    runner: Runner,
    batches: Sequence[Batch],
    metric: LayerMetric,
    progress: Progress = silent,
) -> Scores:
    """How far the states after a layer are from those before it.

    By `cosine` a layer's score is 1 - mean cos(x_l, x_(l+1)) (ShortGPT's block influence, 2403.03853), and the
    distance of layers i and j is mean arccos(cos(x_i, x_j)) / pi (2403.17887, 3.2, there of the last token alone).
    By `cka` it is 1 - linear CKA (1905.00414) of x_l and x_(l+1), tokens being the examples.

    Args:
        runner: of a model that is held whole.
        batches: of text; padding is left out by their masks.

    Raises:
        DataError: no token.
        PruneError: a state is not finite.
    """
    observer = StateObserver(checkpoint.layout, metric)
    observe_batches(runner, observer, batches, "layers", progress)
    return _scores(checkpoint, metric, batches, per="token", **observer.take())


def losses_without(
    checkpoint: Checkpoint, runner: Runner, batches: Sequence[Batch], progress: Progress = silent
) -> Scores:
    """ln(perplexity without a layer / perplexity), each layer passed by in turn: the mean loss of the counted tokens.

    Args:
        runner: of a model that is held whole.

    Raises:
        DataError: no token, or a loss of the whole model that is not finite.
    """
    model, tokens = runner.model, 0

    def loss(advance: Callable[[float], None], whole: bool) -> float:
        nonlocal tokens
        nats, tokens = 0.0, 0

        def finish(batch: Batch, losses: tuple[Tensor, Tensor]) -> int:
            nonlocal nats, tokens
            if whole:
                require_finite(losses[0], batch)
            nats += float(losses[0].double().sum())
            tokens += int(losses[1].sum())
            advance(len(batch.indices))
            return 0

        run_forward(runner, batches, partial(token_losses, model), finish)
        return nats

    base, without = _without_each(checkpoint, model, batches, loss, "the loss", progress)
    rises = {name: [nats - base for nats in own] for name, own in without.items()}
    return _scores(
        checkpoint,
        "perplexity",
        batches,
        per="prediction",
        values={
            name: [rise if abs(rise) < LARGEST else LARGEST for rise in own] for name, own in rises.items()
        },
        counts=dict.fromkeys(rises, max(tokens, 1)),
    )


def moves_without(
    checkpoint: Checkpoint,
    runner: Runner,
    batches: Sequence[Batch],
    pooling: Pooling,
    progress: Progress = silent,
) -> Scores:
    """Mean over the texts of 1 - cos(vector without a layer, vector), each layer passed by in turn.

    Args:
        runner: of a model that is held whole.
        pooling: makes the vector of a text.

    Raises:
        DataError: no text, or a vector of the whole model that is not finite.
    """
    model, base = runner.model, torch.empty(0)

    def cosines(advance: Callable[[float], None], whole: bool) -> float:
        nonlocal base
        found: list[Tensor] = []

        def finish(batch: Batch, made: Tensor) -> int:
            found.append(made.double().cpu())
            advance(len(batch.indices))
            return 0

        run_forward(runner, batches, partial(batch_vectors, model, pooling), finish)
        vectors = torch.cat(found)
        if whole:
            base = vectors
            if not base.isfinite().all():
                raise DataError("a vector is not finite", "The weights are damaged, or overflow the type.")
        return float(functional.cosine_similarity(vectors, base).sum())

    _, without = _without_each(checkpoint, model, batches, cosines, "the vectors", progress)
    # Without a layer whose absence gives no finite vector the text's vector is as far away as it can be.
    values = {
        name: [own if np.isfinite(own) else -LARGEST for own in found] for name, found in without.items()
    }
    counts = dict.fromkeys(values, len(base))
    return _scores(checkpoint, "embedding", batches, per="example", values=values, counts=counts)


def _scores(checkpoint: Checkpoint, method: LayerMetric, batches: Sequence[Batch], **fields: Any) -> Scores:
    return scores_of(
        checkpoint,
        kind="layer",
        method=method,
        examples=sum(len(batch.indices) for batch in batches),
        ids={axis.name: axis.ids for axis in axes_of(checkpoint, "layer")},
        **fields,
    )


def _without_each(
    checkpoint: Checkpoint,
    model: Any,
    batches: Sequence[Batch],
    measure: Callable[[Callable[[float], None], bool], float],
    what: str,
    progress: Progress,
) -> tuple[float, dict[str, list[float]]]:
    """What is measured of the whole model, and of each stack's axis `[layers]`, while each layer is passed by.

    Args:
        measure: one pass over the batches; its arguments count examples for the progress, and say whether the model is
            whole.
        what: it measures, for the progress.

    Raises:
        DataError: no text.
    """
    if not batches:
        raise DataError("no text to measure layers on", "Give text with at least one line.")
    layers = checkpoint.layout.layers
    total = (len(layers) + 1) * sum(len(batch.indices) for batch in batches)
    found: dict[str, list[float]] = {}
    with progress(f"measuring {what} without each layer", total, "examples") as advance:
        whole = measure(advance, True)
        for layer in layers:
            with passed_by(model.get_submodule(module_name(model, layer.name))):
                found.setdefault(axis_name(layer.side, "layer"), []).append(measure(advance, False))
    return whole, found


@contextmanager
def passed_by(layer: nn.Module) -> Iterator[None]:
    """Within the block, the layer gives the hidden states that it is given; what else it returns stays what it was."""

    def hook(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
        states = _input(arguments, options)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    handle = layer.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _input(arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """The hidden states that a layer is given."""
    states: Tensor = arguments[0] if arguments else options["hidden_states"]
    return states


class StateObserver:
    """Sums what a metric needs of the states before and after each layer: an `Observer`."""

    def __init__(self, layout: ModelLayout, metric: LayerMetric) -> None:
        self._layout, self._kind = layout, _Alignments if metric == "cka" else _Angles
        self._sums: dict[str, _Alignments | _Angles] = {}
        self._real: dict[str, Tensor] = {}
        self._states: dict[str, list[Tensor]] = {stack.side: [] for stack in layout.family.stacks}

    def begin(self, batch: Batch, device: torch.device) -> None:
        """What runs next; a pass that broke off leaves nothing to it."""
        for states in self._states.values():
            states.clear()
        mask = batch.inputs["attention_mask"]
        self._real["encoder"] = mask.bool().to(device)
        self._real["decoder"] = batch.inputs.get("decoder_attention_mask", mask).bool().to(device)

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """See `Observer`."""
        with ExitStack() as hooks:
            for layer in self._layout.layers:
                module = model.get_submodule(module_name(model, layer.name))
                hook = partial(self._add, layer.side)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def take(self) -> dict[str, Any]:
        """The fields `values`, `counts` and `distances` of `Scores`, of all that ran since the last call.

        Raises:
            DataError: no token ran.
            PruneError: they are not finite.
        """
        sums, self._sums = self._sums, {}
        if not all(own.tokens for own in sums.values()):
            raise DataError("no token to measure layers on", "Give text with at least one token.")
        fields: dict[str, dict[str, Any]] = {"values": {}, "counts": {}, "distances": {}}
        for side, own in sums.items():
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
        self, side: Side, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any
    ) -> None:
        states = self._states[side]
        states.append(_input(arguments, options))
        stack = next(stack for stack in self._layout.family.stacks if stack.side == side)
        if len(states) == self._layout.sizes.depth(stack):
            states.append(output[0] if isinstance(output, tuple) else output)
            mask = self._real[side]
            sums = self._sums.setdefault(side, self._kind(len(states)))
            together = (state.to(mask.device).view(*mask.shape, -1) for state in states)
            sums.add([state[mask].float() for state in together])
            states.clear()


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
