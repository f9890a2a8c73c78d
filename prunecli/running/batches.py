"""Run batches of a task forwards, or forwards and back; bytes that a batch takes layer by layer; losses of examples.

An example's loss is the mean cross-entropy of its counted tokens (in nats; of its class in classification). It does
not depend on the batch that the example is in.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from prunecli.errors import DataError, UnsupportedModelError
from prunecli.modules.logits import Logits
from prunecli.modules.pooling import Pooling
from prunecli.progress import Progress, silent
from prunecli.running.encoding import (
    embedding_examples,
    filling,
    labelled_examples,
    lm_windows,
    mlm_examples,
    translation_examples,
    window_examples,
)
from prunecli.running.examples import IGNORED, Batch, Examples, num_examples
from prunecli.running.layerwise.runner import Layerwise, Runner
from prunecli.running.runner import Advance, BatchCost, Group, Observer, ignored
from prunecli.text.choice import Dataset, columns
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.plain import LabelledText

_TEXTS_SECOND = ("fsmt", "xlnet")
"""Types whose layers hold states as `[length, batch, width]`."""
_PADDING = ("led", "longformer")
"""Types that pad texts at their ends to whole windows."""

Line = tuple[str, float | None, str]
"""Text of a progress bar, number of units (None: unknown), and the unit."""


def task_batches(
    tokenizer: Any, model: Any, data: Dataset, batch_tokens: int, pooling: Pooling | None = None
) -> list[Batch]:
    """Batches of each text for the losses of its task.

    Args:
        pooling: of `embedding`.

    Raises:
        UnsupportedModelError: the model has no head for the task.
        UsageError: the model has fewer positions than the context.
        DataError: text that cannot be used.
    """
    text = data.text
    examples: dict[str, Examples]
    if pooling is not None:
        examples = {
            name or "the text": embedding_examples(tokenizer, model, pooling, texts, data.context)
            for name, texts in columns(text, data.pairs).items()
        }
    elif isinstance(text, ParallelText):
        examples = {
            pair_name(*pair): translation_examples(tokenizer, model, text, [pair]) for pair in data.pairs
        }
    elif isinstance(text, LabelledText):
        examples = {str(text.path): labelled_examples(tokenizer, model, text)}
    else:
        name = ", ".join(map(str, text.files))
        if data.task == "mlm":
            examples = {name: mlm_examples(tokenizer, model, text.texts, context=data.context)}
        else:
            windows = lm_windows(tokenizer, model, text.texts, context=data.context)
            examples = {name: window_examples(windows, *filling(model, tokenizer))}
    return [
        replace(batch, text=name)
        for name, of_text in examples.items()
        for batch in of_text.batches(batch_tokens)
    ]


def run_forward(
    runner: Runner,
    batches: Sequence[Batch],
    forward: Callable[[Batch], Any],
    finish: Callable[[Batch, Any], float],
    line: Line,
    progress: Progress,
    *,
    beside: int = 0,
) -> None:
    """Run a forward pass of each batch, without gradients.

    Args:
        forward: of a batch with the runner's model.
        finish: gets each batch, in order, and what its pass returned; returns how many units are done by it.
        line: of the progress, where the model is held whole.
        beside: bytes that `forward` takes beside the model's own activations.

    Raises:
        UsageError, CheckpointError, OutputError: as `runner` does.
    """
    cost = partial(batch_cost, beside=beside)

    def finished(own: Sequence[Batch], number: int, output: Any) -> None:
        advance(finish(own[number], output))

    with shown_groups(runner, batches, cost, line, progress) as (groups, advance, step):
        for group in groups:
            with runner.running(group, step) as run:
                passes = [partial(forward, batch) for batch in group.batches]
                run.forward(passes, finish=partial(finished, group.batches))


class TokenObserver(Observer, ABC):
    """Watches modules through hooks, and knows which tokens of the stack that runs are real."""

    mask: Tensor
    """`[batch, length]` bool of the stack that runs: False for padding."""

    @abstractmethod
    def hooks(self, model: Any) -> Iterator[RemovableHandle]:
        """Add the hooks that this observer needs, one by one."""

    def begin(self, batch: Batch, device: torch.device) -> None:
        """Prepare for the pass of `batch`, which begins in the encoder or the only stack."""
        self.mask = batch.inputs["attention_mask"].bool().to(device)
        self._decoder_mask = batch.inputs.get("decoder_attention_mask", self.mask).bool().to(device)

    def by_text(self, states: Tensor) -> Tensor:
        """Return states of a module as `[batch, length, width]`; some classes hold all tokens along one dimension.

        Raises:
            UnsupportedModelError: they are not of the tokens of the texts.
        """
        if self._model_type in _TEXTS_SECOND:
            states = states.transpose(0, 1)
        if self._model_type in _PADDING:
            states = states[:, : self.mask.shape[1]]
        if self.mask.numel() not in accumulate(states.shape[:-1], mul):
            raise UnsupportedModelError(
                f"a model of type {self._model_type} runs {list(states.shape[:-1])} positions for texts of "
                f"{list(self.mask.shape)} tokens, so that nothing can be measured by token",
                "Choose by a metric that reads no text.",
            )
        return states.reshape(*self.mask.shape, -1)

    def real(self, states: Tensor) -> Tensor:
        """Return the states of real tokens, `[tokens, width]`; see `by_text`."""
        rows = self.by_text(states)
        return rows[self.mask.to(rows.device)]

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """See `Observer`."""
        self._model_type = model.config.model_type

        def decode(*_: Any) -> None:
            self.mask = self._decoder_mask

        with ExitStack() as added:
            if model.config.is_encoder_decoder:
                added.callback(model.get_decoder().register_forward_pre_hook(decode).remove)
            for handle in self.hooks(model):
                added.callback(handle.remove)
            yield


def headless_of(model: Any) -> Any:
    """Return the model below the head of `model`.

    Raises:
        UnsupportedModelError: it takes no tokens, as Perceiver's does not.
    """
    headless = model.base_model
    if headless.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"{type(headless).__name__} takes {headless.main_input_name} in the place of tokens, so that nothing can "
            "be measured by token",
            "Choose another metric or task.",
        )
    return headless


def observe_batches(
    runner: Runner,
    observer: TokenObserver,
    batches: Sequence[Batch],
    what: str,
    progress: Progress = silent,
    finish: Callable[[Batch], object] = ignored,
) -> None:
    """Run the model without its head on all of `batches` while `observer` watches.

    Args:
        what: is measured, for the line of the progress and for messages.
        finish: called with each batch, in order, after its pass.

    Raises:
        DataError: no batch.
        UsageError, CheckpointError, OutputError: as `runner` does.
    """
    if not batches:
        raise DataError(f"no text to measure {what} on", "Give text with at least one line.")
    headless = headless_of(runner.model)
    total = num_examples(batches)

    def forward(batch: Batch) -> None:
        observer.begin(batch, runner.device)
        headless(**batch.arguments(headless))

    def finished(batch: Batch, _output: None) -> int:
        finish(batch)
        return len(batch.indices)

    with observer.watching(runner.model):
        run_forward(runner, batches, forward, finished, (f"measuring {what}", total, "examples"), progress)


@contextmanager
def shown_groups(
    runner: Runner,
    batches: Sequence[Batch],
    cost: Callable[[Layerwise, Batch], BatchCost],
    line: Line,
    progress: Progress,
    *,
    ways: int = 1,
) -> Iterator[tuple[Sequence[Group[Batch]], Advance, Advance]]:
    """Groups of batches, and one line of progress while they run.

    Args:
        ways: how often a batch goes through all layers.

    Yields:
        The groups, an `Advance` by units of `line`, and one by passes through layers; one of the two does nothing.
    """
    groups = list(runner.groups(batches, cost))
    what, total, unit = line
    if runner.layerwise:
        how = "layer by layer" if len(groups) < 2 else f"layer by layer, in {len(groups)} groups"
        steps = runner.steps({"encoder": len(batches), "decoder": len(batches)})
        what, total, unit = f"{what}, {how}", ways * steps, "batches x layers"
    with progress(what, total, unit) as advance:
        yield (groups, ignored, advance) if runner.layerwise else (groups, advance, ignored)


def batch_cost(
    runner: Layerwise, batch: Batch, *, backward: bool = False, headless: bool = False, beside: int = 0
) -> BatchCost:
    """Bytes of a batch layer by layer: activations of its widest layer or its logits, and states between layers.

    Args:
        backward: whether gradients are computed, for which the output of every layer is stored.
        headless: whether there are no logits.
        beside: bytes that are taken beside the model's own activations.
    """
    shape, config, labels = runner.shape, runner.model.config.get_text_config(), batch.labels
    rows, keys = batch.inputs["input_ids"].shape
    targets = batch.inputs.get("decoder_input_ids", batch.inputs["input_ids"]).shape[1]
    is_of_tokens = labels.dim() > 1
    values = int(config.vocab_size if is_of_tokens else config.num_labels)
    tokens = labels.numel() if is_of_tokens else rows * keys
    activations, states = 0 if headless else shape.output_bytes(values, tokens, backward=backward), 0
    for side, length in (("encoder", keys), ("decoder", targets)):
        stages = [stage for stage in runner.skeleton.stages if stage.side == side]
        if not stages:
            continue
        activations = max(activations, shape.activation_bytes(rows, length, keys, backward=backward))
        output = rows * length * shape.d_model * shape.itemsize
        sent = shape.state_bytes(rows * length, rows * length) - output
        states += output + sent
        if runner.has_position_bias:
            states += shape.heads * length * (length + keys) * shape.itemsize
        if backward:
            mixtures = sum(stage.mixture is not None for stage in stages)
            states += len(stages) * output + (mixtures + 1) * sent
    return BatchCost(activations + beside, (states,))


def token_losses(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of the counted tokens' cross-entropies of each example, and how many there are.

    Returns:
        sums `[B]` float32 on the model's device, differentiable; counts `[B]` int64 on the CPU. In classification the
        one class of an example counts as its token.
    """
    labels = batch.labels
    counted = labels != IGNORED
    counts = counted.sum(dim=1) if labels.dim() > 1 else torch.ones_like(labels)
    targets, mask = labels[counted].to(model.device), counted.to(model.device)
    logits = Logits(model, batch.arguments(model), mask)
    losses = torch.cat(
        logits.each(
            lambda number, place: functional.cross_entropy(
                logits.block(number).float(), targets[place], reduction="none"
            )
        )
    )
    if labels.dim() < 2:
        return losses, counts
    return losses.new_zeros(labels.shape).masked_scatter(mask, losses).sum(dim=1), counts


def example_losses(model: Any, batch: Batch) -> Tensor:
    """Mean loss of each example's counted tokens, `-1/T sum_t log p(y_t | ...)`; of its class in classification.

    Args:
        model: in evaluation mode, with the task's head (`require_task`).

    Returns:
        `[B]` float32 on the model's device, differentiable; 0 for an example without counted tokens.
    """
    sums, counts = token_losses(model, batch)
    return sums / counts.clamp(min=1).to(sums.device)


def require_finite(losses: Tensor, batch: Batch) -> None:
    """Refuse losses that nothing can be computed from.

    Raises:
        DataError: a loss is NaN or infinite; the message names the example.
    """
    finite = torch.isfinite(losses).tolist()
    if not all(finite):
        row, text = finite.index(False), f"{batch.text}, " if batch.text else ""
        raise DataError(
            f"{text}example {batch.indices[row] + 1:,}: the loss is {losses[row].item()}, not a finite number",
            "The weights are damaged, or overflow the type: try `dtype=float32`.",
        )


def measure_losses(
    runner: Runner, batches: Sequence[Batch], count: int, what: str, progress: Progress = silent
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`token_losses` of all batches.

    Args:
        count: of the examples.
        what: is done, for the progress.

    Returns:
        Of each example `[count]` the sum of the counted tokens' cross-entropies, and how many there are; 0 of examples
        in no batch. Examples of one number in several batches add up.

    Raises:
        DataError: a loss is not finite.
        UsageError, CheckpointError, OutputError: as `runner` does.
    """
    nats, tokens = np.zeros(count), np.zeros(count, np.int64)

    def finish(batch: Batch, losses: tuple[Tensor, Tensor]) -> int:
        sums, counts = losses
        require_finite(sums, batch)
        nats[[*batch.indices]] += sums.double().cpu().numpy()
        tokens[[*batch.indices]] += counts.numpy()
        return batch.tokens

    line = what, sum(batch.tokens for batch in batches), "tokens"
    run_forward(runner, batches, partial(token_losses, runner.model), finish, line, progress)
    return nats, tokens


Losses = Callable[[Any, Batch], Tensor]
"""From a model and a batch to the loss of each example, `[B]`, differentiable."""


def differentiate_losses(
    runner: Runner,
    batches: Sequence[Batch],
    losses_of: Losses,
    progress: Progress,
) -> None:
    """Backward passes of the sum of each batch's losses; what comes of them is for an observer.

    The examples of a batch do not interact, so the gradient of the sum of their losses holds each example's own.

    Args:
        losses_of: of the examples of a batch.

    Raises:
        DataError: a loss is not finite.
        UsageError, CheckpointError, OutputError: as `runner` does.
    """

    def start(first: int, number: int, losses: Tensor) -> Tensor:
        require_finite(losses.detach(), batches[first + number])
        return losses.sum()

    cost = partial(batch_cost, backward=True)
    line = "scoring units", num_examples(batches), "examples"
    with shown_groups(runner, batches, cost, line, progress, ways=2) as (groups, advance, step):
        for group in groups:
            with runner.running(group, step) as run:
                passes = [partial(losses_of, runner.model, batch) for batch in group.batches]
                run.backward(passes, partial(start, group.start))
            advance(num_examples(group.batches))


def batch_vectors(model: Any, pooling: Pooling, batch: Batch) -> Tensor:
    """`[B, width]` float32 on the model's device, differentiable; a head that the model has is not run.

    Raises:
        UnsupportedModelError: the class has no model without its head.
    """
    headless = headless_of(model)
    output = headless(**batch.arguments(headless))
    if "last_hidden_state" not in output:
        raise UnsupportedModelError(
            f"embedding: {type(model).__name__} does not run without its head, so that a text has no vector",
            "Choose another metric or task.",
        )
    return pooling(output.last_hidden_state, batch.inputs["attention_mask"])


def random_projections(pooling: Pooling, model: Any, batch: Batch) -> Tensor:
    """r_x^T v(x) / |v(x)| for each text x, with r_x ~ N(0, I), drawn anew for each number of a text.

    The distance to the vector that the whole model makes has no gradient at the whole model. This has: the mean over r
    of |d/dxi r^T u|, with u = v / |v| and a mask xi, is sqrt(2 / pi) |du/dxi|, and |du/dxi|^2 is to second order
    the distance |u(xi = 1) - u(xi = 0)|^2 = 2 (1 - cos) that the mask makes.

    Returns:
        `[B]` float32 on the model's device, differentiable.
    """
    units = functional.normalize(batch_vectors(model, pooling, batch), dim=1)
    width = units.shape[1]
    drawn = [np.random.default_rng(number).standard_normal(width, np.float32) for number in batch.indices]
    return (units * torch.from_numpy(np.stack(drawn)).to(units.device)).sum(dim=1)
