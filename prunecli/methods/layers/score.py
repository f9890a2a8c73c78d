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
from prunecli.methods.layers.plan import Measured
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.layout import ModelLayout
from prunecli.modules.attention import module_name
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.progress import Progress, Say, silent, unsaid
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
) -> Measured:
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
        return Measured(moves_without(InMemory(model), checkpoint.layout, batches, pooling, progress))
    predicting = metric == "perplexity"
    model, batches = model_and_batches(checkpoint, data, options, say, predicting=predicting)
    if predicting:
        return Measured(losses_without(InMemory(model), checkpoint.layout, batches, progress))
    return state_scores(InMemory(model), checkpoint.layout, batches, metric, progress)


def state_scores(
    runner: Runner,
    layout: ModelLayout,
    batches: Sequence[Batch],
    metric: LayerMetric,
    progress: Progress = silent,
) -> Measured:
    """How far the states after a layer are from those before it.

    By `cosine` a layer's score is 1 - mean cos(x_l, x_(l+1)) (ShortGPT's block influence, 2403.03853), and the
    distance of layers i and j is mean arccos(cos(x_i, x_j)) / pi (2403.17887, 3.2, there of the last token alone).
    By `cka` it is 1 - linear CKA (1905.00414) of x_l and x_(l+1), tokens being the examples.

    Args:
        runner: of a model that is held whole.
        layout: of its checkpoint.
        batches: of text; padding is left out by their masks.

    Raises:
        DataError: no token.
        PruneError: a state is not finite.
    """
    observer = StateObserver(layout, metric)
    observe_batches(runner, observer, batches, "layers", progress)
    return observer.take()


def losses_without(
    runner: Runner, layout: ModelLayout, batches: Sequence[Batch], progress: Progress = silent
) -> dict[str, tuple[float, ...]]:
    """ln(perplexity without a layer / perplexity), each layer passed by in turn: the mean loss of the counted tokens.

    Args:
        runner: of a model that is held whole.

    Raises:
        DataError: no token, or a loss of the whole model that is not finite.
    """
    with _passes(layout, batches, "measuring the loss without each layer", progress) as advance:
        model = runner.model

        def loss(check: Callable[[Tensor, Batch], None] = lambda *_: None) -> float:
            nats: list[float] = []
            tokens: list[int] = []

            def finish(batch: Batch, losses: tuple[Tensor, Tensor]) -> int:
                check(losses[0], batch)
                nats.append(float(losses[0].double().sum()))
                tokens.append(int(losses[1].sum()))
                advance(len(batch.indices))
                return 0

            run_forward(runner, batches, partial(token_losses, model), finish)
            return sum(nats) / max(sum(tokens), 1)

        whole = loss(require_finite)
        return _without_each(model, layout, lambda: loss() - whole)


def moves_without(
    runner: Runner,
    layout: ModelLayout,
    batches: Sequence[Batch],
    pooling: Pooling,
    progress: Progress = silent,
) -> dict[str, tuple[float, ...]]:
    """Mean over the texts of 1 - cos(vector without a layer, vector), each layer passed by in turn.

    Args:
        runner: of a model that is held whole.
        pooling: makes the vector of a text.

    Raises:
        DataError: no text, or a vector of the whole model that is not finite.
    """
    with _passes(layout, batches, "measuring the vectors without each layer", progress) as advance:
        model = runner.model

        def vectors() -> Tensor:
            found: list[Tensor] = []

            def finish(batch: Batch, made: Tensor) -> int:
                found.append(made.double().cpu())
                advance(len(batch.indices))
                return 0

            run_forward(runner, batches, partial(batch_vectors, model, pooling), finish)
            return torch.cat(found)

        whole = vectors()
        if not whole.isfinite().all():
            raise DataError("a vector is not finite", "The weights are damaged, or overflow the type.")
        return _without_each(
            model, layout, lambda: float(1 - functional.cosine_similarity(vectors(), whole).mean())
        )


@contextmanager
def _passes(
    layout: ModelLayout, batches: Sequence[Batch], what: str, progress: Progress
) -> Iterator[Callable[[float], None]]:
    """The progress of passes of the whole model and without each layer."""
    if not batches:
        raise DataError("no text to measure layers on", "Give text with at least one line.")
    total = (len(layout.layers) + 1) * sum(len(batch.indices) for batch in batches)
    with progress(what, total, "examples") as advance:
        yield advance


def _without_each(
    model: Any, layout: ModelLayout, measure: Callable[[], float]
) -> dict[str, tuple[float, ...]]:
    """What is measured while a layer is passed by, of each in turn; infinity for what is not finite."""
    found: dict[str, list[float]] = {}
    for layer in layout.layers:
        with passed_by(model.get_submodule(module_name(model, layer.name))):
            value = measure()
        found.setdefault(layer.side, []).append(value if np.isfinite(value) else np.inf)
    return {side: tuple(values) for side, values in found.items()}


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

    def take(self) -> Measured:
        """The scores of all that ran since the last call.

        Raises:
            DataError: no token ran.
            PruneError: they are not finite.
        """
        if not all(sums.tokens for sums in self._sums.values()):
            raise DataError("no token to measure layers on", "Give text with at least one token.")
        results = {side: sums.result() for side, sums in self._sums.items()}
        tokens: dict[str, int] = {side: sums.tokens for side, sums in self._sums.items()}
        self._sums = {}
        for side, (scores, _) in results.items():
            if not np.isfinite(scores).all():
                raise PruneError(
                    f"The hidden states of the {side} are not finite, or the same for every token.",
                    "The weights are damaged, or overflow the type they are run in: use --metric last or random.",
                )
        distances = {side: found for side, (_, found) in results.items() if found is not None}
        return Measured(
            {side: tuple(scores.tolist()) for side, (scores, _) in results.items()}, distances or None, tokens
        )

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

    def result(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Scores `[L]` and distances `[L + 1, L + 1]`."""
        return 1 - np.diagonal(self.cosines, 1) / self.tokens, self.angles / self.tokens


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

    def result(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Scores `[L]`; distances there are none."""
        means = [total / self.tokens for total in self.sums]

        def square(products: Tensor, first: int, second: int) -> float:
            centred = products - self.tokens * torch.outer(means[first], means[second])
            return float(centred.square().sum())

        own = [square(products, place, place) for place, products in enumerate(self.own)]
        crossed = [square(products, place, place + 1) for place, products in enumerate(self.next)]
        with np.errstate(divide="ignore", invalid="ignore"):
            norms = np.sqrt(np.array(own[:-1]) * np.array(own[1:]))
            return 1 - np.array(crossed) / norms, None
