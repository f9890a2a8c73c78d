"""Scores for the units of every axis: how much the loss depends on a mask of the unit (1905.10650, eq. 2).

A mask xi multiplies what a unit adds to the model's hidden states. The output weights of a head, hidden unit or expert
are linear in that part, so that dL/dxi is the sum of w dL/dw over these weights. A layer adds its output less its
input. The score of a unit is I = E |dL(x)/dxi|, the mean over the examples x of a text: one forward and one backward
pass, for all axes together.

The score of a channel of the residual stream is measured in the same pass: the sum of |y| over all tokens of an example
and all norms of the stream, y being the norm's output on the channel (2407.14679, 2.2).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.model.axes import Axis, Kind, axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.find_axes import CHANNELS, axes_of
from prunecli.model.patchwork import module_name
from prunecli.model.probe import outputs
from prunecli.model.trial import stream_norms
from prunecli.modules.hooks import states_of
from prunecli.modules.loading import sparse_ffns
from prunecli.modules.pooling import read_pooling
from prunecli.modules.stock_experts import expert_modules, part_names
from prunecli.modules.stock_names import StockNames
from prunecli.progress import Progress, silent
from prunecli.results.unit_scores import Scores, scores_of
from prunecli.running.batches import task_batches
from prunecli.running.losses import example_losses, random_projections, require_finite
from prunecli.text.choice import Dataset
from prunecli.text.tokens import load_tokenizer

GRADIENT, NORMS = "gradient", "norm-output"
Add = Callable[[str, Tensor], None]
"""Adds `[units]` of dL/dxi, or of a channel's outputs, of the present example to an axis."""
Take = Callable[[Tensor], None]
"""Takes w dL/dw of a parameter w."""


def score_units(
    checkpoint: Checkpoint,
    model: Any,
    data: Dataset,
    kinds: Sequence[Kind],
    progress: Progress = silent,
) -> dict[Kind, Scores]:
    """Score the units of several kinds on text, see the module.

    Args:
        model: the checkpoint's, in float32 or bfloat16. Its parameters ask for no gradients afterwards.
        data: the text, with its task. For an embedding model L(x) is that of `random_projections`.
        kinds: kinds of units that the checkpoint has, except tokens.

    Raises:
        DataError: a loss that is not finite, or text that cannot be used.
        PruneError: a gradient that is not finite.
        UnsupportedModelError: transformers stores the units' weights otherwise than the checkpoint.
    """
    pooling = read_pooling(checkpoint.path) if data.task == "embedding" else None
    losses_of = example_losses if pooling is None else partial(random_projections, pooling)
    by_text = task_batches(load_tokenizer(checkpoint.path), model, data, 1, pooling)
    batches = [batch for of_text in by_text.values() for batch in of_text]
    axes = {axis.name: axis for kind in kinds for axis in axes_of(checkpoint, kind)}
    present: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {name: torch.zeros(len(axis.ids)) for name, axis in axes.items()}

    def add(name: str, gradients: Tensor) -> None:
        present[name] = present.get(name, 0) + gradients.float().cpu()

    model.requires_grad_(False)
    with ExitStack() as hooks, progress("scoring all units", len(batches), "examples") as advance:
        hooks.callback(model.requires_grad_, False)
        takers: dict[Tensor, list[Take]] = {}
        for watch in (_weights, _experts):
            for parameter, take in watch(checkpoint, model, axes, add):
                takers.setdefault(parameter, []).append(take)
        for parameter, together in takers.items():
            hooks.callback(_watch(parameter, together).remove)
        for watch_modules in (_watch_layers, _watch_norms):
            for handle in watch_modules(checkpoint, model, axes, add):
                hooks.callback(handle.remove)
        hooks.enter_context(torch.enable_grad())
        for batch in batches:
            losses = losses_of(model, batch)
            require_finite(losses.detach(), batch)
            if losses.requires_grad:
                losses.sum().backward()  # type: ignore[no-untyped-call]
            for name, gradients in present.items():
                sums[name] += gradients.abs()
            present.clear()
            advance(1)
    return {
        kind: scores_of(
            checkpoint,
            kind=kind,
            method=NORMS if kind == "channel" else GRADIENT,
            task=data.task,
            examples=len(batches),
            per="example",
            ids={axis.name: axis.ids for axis in own},
            values={axis.name: sums[axis.name].tolist() for axis in own},
            counts={axis.name: len(batches) for axis in own},
        )
        for kind in kinds
        if (own := [axis for axis in axes.values() if axis.kind == kind])
    }


def _weights(
    checkpoint: Checkpoint, model: Any, axes: dict[str, Axis], add: Add
) -> Iterator[tuple[Tensor, Take]]:
    """The output weights of heads and hidden units."""
    names = StockNames(checkpoint, model) if checkpoint.runs_stock else None
    for axis in axes.values():
        for tensor in outputs(axis.carriers) if axis.kind in ("head", "unit") else ():
            dim, expert, place = axis.carriers[tensor].dim, None, module_name(model, tensor)
            if names is not None and (stacked := names.stacked(tensor)) is not None:
                place, expert = stacked[0], int(re.findall(r"\.(?:expert_)?(\d+)\.", tensor)[-1])
            elif names is not None:
                place = names.place(tensor)
            yield model.get_parameter(place), partial(_by_unit, add, axis.name, len(axis.ids), dim, expert)


def _by_unit(add: Add, name: str, units: int, dim: int, expert: int | None, products: Tensor) -> None:
    own = products if expert is None else products[expert]
    add(name, own.movedim(dim, 0).reshape(units, -1).sum(dim=1))


def _experts(
    checkpoint: Checkpoint, model: Any, axes: dict[str, Axis], add: Add
) -> Iterator[tuple[Tensor, Take]]:
    """The output weights of experts."""
    if not any(axis.kind == "expert" for axis in axes.values()):
        return
    layers = [layer for layer in checkpoint.mixtures if not layer.is_predicting]
    modules = sparse_ffns(model) or expert_modules(model)
    for layer, module in zip(layers, modules.values(), strict=True):
        parts = ("", "fc2_weight", "", "fc2_bias") if hasattr(module, "fc2_weight") else part_names(module)
        for part in parts[1::2]:
            each = partial(_by_unit, add, axis_name(layer.name, "expert"), len(layer.experts), 0, None)
            yield getattr(module, part), each


def _watch_layers(checkpoint: Checkpoint, model: Any, axes: dict[str, Axis], add: Add) -> Iterator[Any]:
    """Watch what each layer adds to its input."""

    def note(
        name: str, number: int, _: nn.Module, given: tuple[Any, ...], options: dict[str, Any], output: Any
    ) -> Any:
        before = given[0] if given else options["hidden_states"]
        made: Any = states_of(output)
        if not made.requires_grad:  # nothing below has units that are watched: the graph begins here
            made = made.detach().requires_grad_()
        change = (made - before.to(made.device)).detach()

        def multiply(gradient: Tensor) -> None:
            found = torch.zeros(len(axes[name].ids))
            found[number] = (change.float() * gradient.float()).sum().cpu()
            add(name, found)

        made.register_hook(multiply)
        return (made, *output[1:]) if isinstance(output, tuple) else made

    numbers: Counter[str] = Counter()
    for layer in checkpoint.layout.layers:
        name = axis_name(layer.side, "layer")
        if name in axes:
            module = model.get_submodule(module_name(model, layer.name))
            yield module.register_forward_hook(partial(note, name, numbers[name]), with_kwargs=True)
        numbers[name] += 1


def _watch_norms(checkpoint: Checkpoint, model: Any, axes: dict[str, Axis], add: Add) -> Iterator[Any]:
    """Watch what norms hand on of each channel."""
    if (axis := axes.get(CHANNELS)) is None:
        return

    def note(_: nn.Module, __: Any, made: Tensor) -> None:
        if made.shape[-1] == len(axis.ids):
            add(CHANNELS, made.detach().float().abs().reshape(-1, len(axis.ids)).sum(dim=0))

    for norm in stream_norms(model, {*map(StockNames(checkpoint, model).parameter, axis.carriers)}):
        yield norm.register_forward_hook(note)


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
