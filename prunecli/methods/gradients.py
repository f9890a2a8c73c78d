"""Scores for the units of every axis: how much the loss depends on a mask of the unit (1905.10650, eq. 2).

A mask xi multiplies what a unit adds to the model's hidden states. The output weights of a head, hidden unit or expert
are linear in that part, so that dL/dxi is the sum of w dL/dw over these weights. A layer adds its output less its
input. The score of a unit is I = E |dL(x)/dxi|, the mean over the examples x of a text: one forward and one backward
pass, for all axes together.

Gradients of the tokens in a window of plain text mostly cancel out, and there are few windows. So the score of a hidden
unit of a causal language model is E (dL/dxi)^2 over all tokens, with a mask xi for each: the diagonal of the Fisher
information (2204.09656, 3.2), and HEAPr's score of units of experts (2509.22299) but for its factor 1/2. Where several
modules read the activations, or none that can be watched, xi is a mask for the whole window.

The score of a channel of the residual stream is measured in the same pass: the sum of |y| over all tokens of an example
and all norms of the stream, y being the norm's output on the channel (2407.14679, 2.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from prunecli.errors import PruneError, UnsupportedModelError
from prunecli.evaluation.on_text import RunOptions, runner_of
from prunecli.methods.units import units_of_experts
from prunecli.model.axes import Axis, Carrier, Kind, axis_name, module_of
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.find_axes import CHANNELS
from prunecli.model.patchwork import module_name, submodule
from prunecli.model.probe import MIXES, layer_of, outputs
from prunecli.model.trial import given_states, stream_norms
from prunecli.modules.hooks import replaced, states_of
from prunecli.modules.pooling import read_pooling
from prunecli.modules.stock_experts import expert_modules, own_experts
from prunecli.modules.stock_names import StockNames
from prunecli.private import can_replace_experts
from prunecli.progress import Progress, silent
from prunecli.results.unit_scores import Per, Scores, scores_of
from prunecli.running.batches import (
    Losses,
    differentiate_losses,
    example_losses,
    random_projections,
    task_batches,
)
from prunecli.running.examples import Batch, num_examples
from prunecli.running.runner import REHEARSING, Runner, frozen
from prunecli.text.choice import Dataset
from prunecli.text.tokens import load_tokenizer

GRADIENT, NORMS = "gradient", "norm-output"
Add = Callable[[str, Tensor], None]
"""Adds dL/dxi, or a channel's outputs, in the present batch to an axis, see `_Sums.add`."""
Take = Callable[[Tensor], None]
"""Takes w dL/dw of a parameter w, or a dL/da of activations."""


@dataclass
class _Sums:
    """Sums over examples, or their tokens, of |dL/dxi|, or of its square, for the units of each axis.

    Attributes:
        per: what the absolute value is taken of.
        readers: axis whose squares are summed -> number of tensors that read its activations. Of a single one squares
            are taken at once, since the tokens of all layers would not fit in memory.
        rows: examples in the present batch.
        present: name of an axis -> `[examples, tokens or 1, units]` of dL/dxi of the present batch.
        sums: name of an axis -> `[units]`, without the present batch.
    """

    per: Per
    readers: Mapping[str, int]
    rows: int = 1
    present: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, gradients: Tensor) -> None:
        """Add `[tokens, units]`, or `[units]` of an only example: a module may be run several times in a pass."""
        if self.readers.get(name) == 1:
            self._sum(name, gradients)
            return
        of_tokens = gradients.reshape(self.rows, -1, gradients.shape[-1])
        own = of_tokens if self.per == "token" else of_tokens.sum(dim=1, keepdim=True)
        self.present[name] = self.present[name] + own if name in self.present else own

    def flush(self, rows: int = 1) -> None:
        """Take the values of the present batch, before one of `rows` examples begins."""
        for name, own in self.present.items():
            self._sum(name, own)
        self.present.clear()
        self.rows = rows

    def _sum(self, name: str, gradients: Tensor) -> None:
        values = gradients.square() if name in self.readers else gradients.abs()
        added = values.reshape(-1, values.shape[-1]).sum(dim=0, dtype=torch.float64)
        self.sums[name] = self.sums[name] + added if name in self.sums else added


def gradient_sums(
    runner: Runner,
    checkpoint: Checkpoint,
    axes: Sequence[Axis],
    batches: Mapping[str, Sequence[Batch]],
    progress: Progress = silent,
    *,
    per: Per = "example",
    fisher: bool = False,
    losses_of: Losses = example_losses,
) -> dict[str, NDArray[np.float64]]:
    """Sum over examples x of |dL(x)/dxi_u| for every unit u of some axes, see the module.

    L(x) is the example's mean token loss. Per token the absolute value is taken at each position, as in the code that
    the paper's authors released, and the sum is over the positions of all examples. Padding adds nothing: no loss
    depends on it.

    Args:
        runner: runs the checkpoint's model in float32 or bfloat16 (float16 loses small gradients). Layer by layer
            neither experts nor channels are scored.
        axes: of any kinds but tokens. With experts or channels batches hold one example each, and with the hidden units
            of experts that only the model's class can run; so they do where layers hold texts along another dimension
            than the first (FSMT, XLNet, Gemma 3n).
        batches: name of a text, for messages -> its batches.
        fisher: whether squares over tokens are summed for hidden units.
        losses_of: L(x) of each example of a batch.

    Returns:
        Name of an axis -> `[units]`.

    Raises:
        DataError: an example's loss is not finite.
        PruneError: a gradient is not finite.
        UnsupportedModelError: transformers stores the units' weights otherwise than the checkpoint.
        UsageError, CheckpointError, OutputError: as `runner` does.
    """
    model, every = runner.model, {axis.name: axis for axis in axes}
    readers = {axis.name: len(outputs(axis.carriers)) for axis in axes if axis.kind == "unit" and fisher}
    sums = _Sums(per, readers)

    def losses(model: Any, batch: Batch) -> Tensor:
        sums.flush(len(batch.indices))
        return losses_of(model, batch)

    names = StockNames(checkpoint, model) if checkpoint.runs_stock else None
    with frozen(model), ExitStack() as hooks:
        takers: dict[Tensor, list[Take]] = {}
        seen = _watch_units_of_experts(checkpoint, model, every, sums.add, hooks)
        if seen and runner.layerwise:  # experts run apart: the graph begins below the layers
            model.enable_input_require_grads()
            hooks.callback(model.disable_input_require_grads)
        named = {name: axis for name, axis in every.items() if name not in seen}
        watched = (
            _inputs(names, model, named, sums.add, hooks),
            _experts(names, checkpoint, model, named, sums.add),
        )
        for parameter, take in chain(*watched):
            takers.setdefault(parameter, []).append(take)
        for parameter, together in takers.items():
            hooks.enter_context(_watch(parameter, together))
            hooks.callback(parameter.requires_grad_, False)
        _watch_layers(checkpoint, model, named, sums.add, hooks)
        _watch_norms(checkpoint, model, named, sums.add, hooks)
        differentiate_losses(runner, batches, losses, progress)
    sums.flush()
    found = {}
    reached = {axis.kind for axis in axes if axis.name in sums.sums}
    if unreached := sorted({axis.kind for axis in axes} - reached):
        raise UnsupportedModelError(
            f"{unreached[0]}s cannot be scored: no gradient reaches them, since the class computes "
            "gradients of its own",
            "Rank them by another metric, such as activations, or at random.",
        )
    for name, axis in every.items():
        # Where no gradient came, no loss depends on the units.
        found[name] = sums.sums[name].cpu().numpy() if name in sums.sums else np.zeros(axis.count)
        if not np.isfinite(found[name]).all():
            raise PruneError(
                f"{module_of(name)}: a gradient is not finite, though every loss is",
                "Compute with `dtype=float32`.",
            )
    return found


def measure_gradients(
    checkpoint: Checkpoint,
    data: Dataset,
    axes: Mapping[Kind, Sequence[Axis]],
    running: RunOptions,
    progress: Progress,
) -> dict[Kind, Scores]:
    """Load the model of a checkpoint and score the units of each kind, see `gradient_fields`.

    Args:
        running: how the model runs; its batches are of one example.
    """
    runner, _ = runner_of(checkpoint, running, gradients=True)
    fields = gradient_fields(checkpoint, runner, data, axes, progress=progress)
    return {kind: scores_of(checkpoint, **own) for kind, own in fields.items()}


def gradient_fields(
    checkpoint: Checkpoint,
    runner: Runner,
    data: Dataset,
    axes: Mapping[Kind, Sequence[Axis]],
    batch_tokens: int = 1,
    per: Per = "example",
    progress: Progress = silent,
) -> dict[Kind, dict[str, Any]]:
    """Fields of `Scores` for the units of each kind, see `gradient_sums`.

    Args:
        axes: kind -> its axes.
        data: the text, with its task. For an embedding model L(x) is that of `random_projections`.
        batch_tokens: padded tokens in a batch; 1: each example is one.
    """
    pooling = read_pooling(checkpoint.path) if data.task == "embedding" else None
    losses_of = example_losses if pooling is None else partial(random_projections, pooling)
    by_text = task_batches(load_tokenizer(checkpoint.path), runner.model, data, batch_tokens, pooling)
    every = [axis for own in axes.values() for axis in own]
    fisher = data.task == "lm"
    sums = gradient_sums(
        runner, checkpoint, every, by_text, progress, per=per, fisher=fisher, losses_of=losses_of
    )
    batches = [batch for of_text in by_text.values() for batch in of_text]
    examples = num_examples(batches)

    def tokens(axis: Axis) -> int:
        mask = "attention_mask" if axis.side == "encoder" else "decoder_attention_mask"
        return sum(int(batch.inputs.get(mask, batch.inputs["attention_mask"]).sum()) for batch in batches)

    found = {}
    for kind, own in axes.items():
        by = "token" if fisher and kind == "unit" else per
        found[kind] = {
            "kind": kind,
            "method": NORMS if kind == "channel" else GRADIENT,
            "task": data.task,
            "examples": examples,
            "per": by,
            "ids": {axis.name: axis.ids for axis in own},
            "values": {axis.name: sums[axis.name].tolist() for axis in own},
            "counts": {axis.name: examples if by == "example" else tokens(axis) for axis in own},
        }
    return found


def _inputs(
    names: StockNames | None, model: Any, axes: Mapping[str, Axis], add: Add, hooks: ExitStack
) -> Iterator[tuple[Tensor, Take]]:
    """Watch the inputs of the linear layers that mix heads and hidden units; yield the output weights of the others."""
    for axis in axes.values():
        for tensor in outputs(axis.carriers) if axis.kind in ("head", "unit") else ():
            carrier, count = axis.carriers[tensor], axis.count
            place = module_name(model, tensor) if names is None else names.place(tensor)
            owner, _, attribute = place.rpartition(".")
            parameter = model.get_parameter(place)
            if attribute == "weight" and parameter.dim() == 2:
                hook = partial(_note_input, add, axis.name, carrier, count)
                hooks.enter_context(model.get_submodule(owner).register_forward_pre_hook(hook))
            else:
                yield parameter, partial(_by_unit, add, axis.name, carrier, count)


def _note_input(
    add: Add, name: str, carrier: Carrier, units: int, _: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """dL/dxi is the sum of a dL/da over a unit's values a, as far as its output weights read them."""
    values, *rest = inputs
    if not values.requires_grad:  # nothing below has units that are watched: the graph begins here
        values = values.detach().requires_grad_()
    values = values.view_as(values)  # which nothing else reads
    _on_gradient(values, values, lambda product: add(name, _unit_sums(product, carrier, units)))
    return (values, *rest)


def _on_gradient(values: Tensor, factor: Tensor, take: Take) -> None:
    """Have `take` called with `factor` x dL/d`values`, `[tokens, width]` float32, in the backward pass."""
    held = [factor.detach()]

    def multiply(gradient: Tensor) -> None:
        take((held.pop().float() * gradient.float()).flatten(0, -2))  # popped: freed as the pass goes down

    values.register_hook(multiply)  # type: ignore[no-untyped-call]


def _by_unit(add: Add, name: str, carrier: Carrier, units: int, products: Tensor) -> None:
    add(name, _unit_sums(products.movedim(carrier.dim, -1).flatten(0, -2).sum(dim=0), carrier, units))


def _unit_sums(values: Tensor, carrier: Carrier, units: int) -> Tensor:
    """`[..., units]`: sums of `[..., size]` over the places of each unit."""
    width = carrier.unit(values.shape[-1], units)
    blocks = torch.split(values, [block * units * width for block in carrier.blocks], dim=-1)
    return torch.stack([block.reshape(*block.shape[:-1], units, -1).sum(dim=-1) for block in blocks]).sum(
        dim=0
    )


def _experts(
    names: StockNames | None, checkpoint: Checkpoint, model: Any, axes: Mapping[str, Axis], add: Add
) -> Iterator[tuple[Tensor, Take]]:
    """The output weights of experts and their biases."""
    if not any(axis.kind == "expert" for axis in axes.values()):
        return
    for layer in checkpoint.mixtures:
        if layer.is_predicting:
            continue
        of_experts: dict[str, int | None]
        if names is None:
            own = module_name(model, layer.name)
            of_experts = {f"{own}.fc2_weight": None, f"{own}.fc2_bias": None}
        else:
            every = sorted(names.of_experts(layer).items())
            of_experts = {name: number for name, number in every if MIXES.search(name, len(layer_of(name)))}
        axis, count = axis_name(layer.name, "expert"), len(layer.experts)
        for name, number in of_experts.items():
            take = (
                partial(_by_unit, add, axis, Carrier(0), count)
                if number is None
                else partial(_of_unit, add, axis, number, count)
            )
            yield model.get_parameter(name), take


def _of_unit(add: Add, name: str, number: int, units: int, products: Tensor) -> None:
    """Add the products of all weights of one unit."""
    add(name, products.sum() * functional.one_hot(torch.tensor(number), units).to(products))


def _watch_units_of_experts(
    checkpoint: Checkpoint, model: Any, axes: Mapping[str, Axis], add: Add, hooks: ExitStack
) -> set[str]:
    """Watch the activations in experts that prunecli can run; return the names of the axes that these are of."""
    of_experts = [axis for axis in axes.values() if axis.kind == "unit" and axis.keys]
    if not (of_experts and expert_modules(model) and can_replace_experts(model)):
        return set()
    places = units_of_experts(checkpoint, of_experts)

    def note(number: int, expert: int, hidden: Tensor, *_: Tensor) -> None:
        if not hidden.requires_grad:  # nothing below has units that are watched: the graph begins here
            hidden.requires_grad_()
        _on_gradient(hidden, hidden, partial(add, places[number, expert]))

    for number, module in enumerate(hooks.enter_context(own_experts(model)).values()):
        module.watcher = partial(note, number)
    return {*places.values()}


def _watch_layers(
    checkpoint: Checkpoint, model: Any, axes: Mapping[str, Axis], add: Add, hooks: ExitStack
) -> None:
    """Watch what each layer adds to its input."""

    def compute(name: str, number: int, forward: Callable[..., Any], *given: Any, **options: Any) -> Any:
        before = given_states(given, options)
        output = forward(*given, **options)
        if REHEARSING.get():
            return output
        made: Any = states_of(output)
        if not made.requires_grad:  # nothing below has units that are watched: the graph begins here
            made = made.detach().requires_grad_()

        def take(products: Tensor) -> None:
            own = products.sum(dim=1, keepdim=True)
            add(name, own * functional.one_hot(torch.tensor(number), axes[name].count).to(own))

        _on_gradient(made, made - before.to(made.device), take)
        return (made, *output[1:]) if isinstance(output, tuple | list) else made

    numbers: Counter[str] = Counter()
    for layer in checkpoint.layout.layers:
        name = axis_name(layer.side, "layer")
        if name in axes:
            module = submodule(model, layer.name)
            hooks.enter_context(replaced({numbers[name]: module}, partial(compute, name)))
        numbers[name] += 1


def _watch_norms(
    checkpoint: Checkpoint, model: Any, axes: Mapping[str, Axis], add: Add, hooks: ExitStack
) -> None:
    """Watch what norms hand on of each channel."""
    if (axis := axes.get(CHANNELS)) is None:
        return

    def note(_: nn.Module, __: Any, made: Tensor) -> None:
        if made.shape[-1] == axis.count:
            add(CHANNELS, made.detach().float().abs().reshape(-1, axis.count).sum(dim=0))

    for norm in stream_norms(model, {*map(StockNames(checkpoint, model).parameter, axis.carriers)}):
        hooks.enter_context(norm.register_forward_hook(note))


def _watch(parameter: Tensor, takers: Sequence[Take]) -> Any:
    """Have `takers` called with w dL/dw of a parameter in each backward pass; the gradient is freed at once."""

    def multiply(own: Tensor) -> None:
        assert own.grad is not None
        products = own.detach().float() * own.grad.float()
        own.grad = None
        for take in takers:
            take(products)

    parameter.requires_grad_(True)
    return parameter.register_post_accumulate_grad_hook(multiply)  # type: ignore[no-untyped-call]
