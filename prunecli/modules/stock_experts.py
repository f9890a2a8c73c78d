"""Mixtures of experts of transformers' own classes, run so that experts' outputs are seen before they are weighted.

Transformers lets the experts of a model be run by a function of one's own: `own_experts` registers one, and within its
block the stock routers, shared experts and blocks go on as they are. Modules are known by the attributes that
`use_experts_implementation` gives them, not by their classes, whose names change.

A token's weighted outputs are added in float32 in the order of the experts, so that a run which reads one expert after
another adds the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.errors import UnsupportedModelError
from prunecli.modules.cpu_linear import dot_products, linear
from prunecli.modules.grouped import (
    Dispatch,
    Span,
    by_expert,
    dispatch,
    grouped_product,
    has_grouped_kernel,
    pays,
)
from prunecli.private import apply_gate, can_replace_experts, is_of_experts

IMPLEMENTATION = "prunecli"
"""The name that the function is registered under."""

Watch = Callable[[Span, Tensor], None]
ROWS_AT_ONCE = 1 << 12
"""Rows of outputs that are copied in another type at a time."""


@dataclass(frozen=True)
class ExpertUse:
    """Inputs and outputs of one forward pass of a module of experts, padding included.

    Attributes:
        experts: `[tokens, top_k]` int64, the chosen experts, in no order that all routers share.
        weights: `[tokens, top_k]`, what their outputs are multiplied by.
        norms: `[tokens, top_k]` float32, Euclidean norms of their outputs before that.
        routed: `[tokens, top_k]` bool, whether the expert took the token; None: every one did.
        sums: returns each expert's outputs added up, see `sums_of`; None: the class does not hand outputs out.
    """

    experts: Tensor
    weights: Tensor
    norms: Tensor
    routed: Tensor | None = None
    sums: Callable[[Tensor | None], Tensor] | None = None


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of all experts, whose first axis is the expert, or of one expert, without that axis.

    Attributes:
        up: `[experts, 2 ffn, width]` with a gate, else `[experts, ffn, width]`; the last two axes the other way around
            where the module is transposed.
        down: `[experts, width, ffn]`, or the other way around.
        up_bias, down_bias: `[experts, 2 ffn or ffn]` and `[experts, width]`, or None.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @classmethod
    def of(cls, module: Any) -> ExpertWeights:
        """Return the weights of a module of experts."""
        return cls(*(getattr(module, name) for name in part_names(module)))

    def __getitem__(self, expert: int | None) -> ExpertWeights:
        """Return the weights of one expert; for None, those of a single expert with the first axis."""
        biases = (None if bias is None else bias[expert] for bias in (self.up_bias, self.down_bias))
        return ExpertWeights(self.up[expert], self.down[expert], *biases)

    def unbind(self) -> list[ExpertWeights]:
        """Return the weights of each expert, as parts of a graph: the gradient of an index is as large as the stack."""
        stacks = (self.up, self.down, self.up_bias, self.down_bias)
        parts = (stack.unbind() for stack in stacks if stack is not None)
        return [ExpertWeights(*own) for own in zip(*parts, strict=True)]


def part_names(module: Any) -> tuple[str, ...]:
    """The stacked parameters of a module of experts, in the order of `ExpertWeights`."""
    weights = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return (*weights, *(f"{name}_bias" for name in weights)) if module.has_bias else weights


def expert_modules(model: nn.Module) -> dict[str, Any]:
    """Name -> module of experts, in the order of the layers."""
    return {name: module for name, module in model.named_modules() if is_of_experts(module)}


def use_own_experts(model: Any) -> str:
    """Have the experts of `model` run by `run_mixture`; returns what they were run by.

    Raises:
        UnsupportedModelError: the model's class does not let its experts be run so.
    """
    from transformers.integrations.moe import ExpertsInterface

    if not can_replace_experts(model):
        raise UnsupportedModelError(
            f"{type(model).__name__}: transformers does not let its experts be run from outside",
            "Choose them with prune-experts --keep FILE or --metric random.",
        )
    ExpertsInterface.register(IMPLEMENTATION, run_mixture)
    before: str = model.get_experts_implementation()
    model.set_experts_implementation(IMPLEMENTATION)
    return before


@contextmanager
def own_experts(model: Any) -> Iterator[dict[str, Any]]:
    """Within the block the experts of `model` are run by `run_mixture`.

    Yields:
        Name -> module of experts. Where one is given an `observer`, that is called with the `ExpertUse` of every
        forward pass; norms are computed only then.

    Raises:
        UnsupportedModelError: the model's class does not let its experts be run so.
    """
    modules = expert_modules(model)
    before = use_own_experts(model)
    try:
        yield modules
    finally:
        model.set_experts_implementation(before)
        for module in modules.values():
            module.observer = module.watcher = None


def run_mixture(module: Any, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The forward pass of a module of experts: sum of w_k f_k(x) over each token's chosen experts; no gradients.

    Args:
        module: see `expert_modules`; an attribute `observer` that is not None is called with the `ExpertUse`. An
            attribute `runner` that is not None computes the experts' outputs where their weights are not held here:
            (rows `[assignments, width]` sorted by expert, `Dispatch`) -> `[assignments, width]`.
            An attribute `watcher` that is not None is called for each expert with its number, the activations that
            its output layer reads `[rows, ffn]`, the numbers of their tokens `[rows]`, and their weights `[rows]`.
        hidden_states: `[tokens, width]`.
        experts: `[tokens, top_k]` int64.
        weights: `[tokens, top_k]`.

    Returns:
        `[tokens, width]` in the type of `hidden_states`.
    """
    plan = dispatch(experts, module.num_experts)
    held = ExpertWeights.of(module)
    rows = hidden_states.to(held.up.dtype).index_select(0, plan.source)
    observer: Callable[[ExpertUse], None] | None = getattr(module, "observer", None)
    runner: Callable[[Tensor, Dispatch], Tensor] | None = getattr(module, "runner", None)
    watcher: Callable[[int, Tensor, Tensor, Tensor], None] | None = getattr(module, "watcher", None)
    watch = None
    if watcher is not None:
        of_rows = torch.empty(len(rows), dtype=weights.dtype, device=weights.device)
        of_rows[plan.position.reshape(-1)] = weights.reshape(-1)

        def watch(span: Span, hidden: Tensor) -> None:
            expert, start, end = span
            watcher(expert, hidden, plan.source[start:end], of_rows[start:end])

    if runner is None:
        runner = partial(outputs_of, module, held=held, watch=watch)
    outputs = runner(rows, plan)
    if observer is not None:
        norms = norms_of(outputs)[plan.position]
        observer(ExpertUse(experts, weights, norms, sums=partial(sums_of, outputs, plan)))
    return combine(outputs, weights, plan.position).to(hidden_states.dtype)


def run_expert(
    module: Any, rows: Tensor, weights: ExpertWeights, watch: Callable[[Tensor], None] | None
) -> Tensor:
    """One expert on its own rows; differentiable where it is watched.

    Args:
        module: of which it is: says how its weights lie, and its activation.
        rows: `[rows, width]`.
        weights: of this expert.
        watch: called with the activations that its output layer reads `[rows, ffn]`.

    Returns:
        `[rows, width]`, before the router's weight.
    """
    count = rows.shape[0]
    if rows.is_cuda and watch is None and _has_kernel(rows, alone := weights[None]):
        return _grouped(module, rows, alone, torch.full((1,), count, device=rows.device))
    hidden = _activated(module, _linear(rows, weights.up, weights.up_bias, module.is_transposed)[:count])
    if watch is not None:
        watch(hidden)
    outputs = _linear(hidden, weights.down, weights.down_bias, module.is_transposed)[:count]
    return _normed(module, outputs)


def norms_of(outputs: Tensor) -> Tensor:
    """`[rows]` float32 of `[rows, width]`."""
    parts = torch.split(outputs, ROWS_AT_ONCE)  # of which torch makes copies in float32
    return torch.cat([torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in parts])


def sums_of(outputs: Tensor, plan: Dispatch, counted: Tensor | None) -> Tensor:
    """Each expert's outputs added up, one after another.

    Args:
        outputs: `[assignments, width]`, sorted by expert.
        counted: `[tokens]` bool, the tokens whose outputs count; None: all.

    Returns:
        `[experts, width]` float64, on the CPU.
    """
    sizes = plan.counts.cpu()
    numbers = torch.arange(len(sizes)).repeat_interleave(sizes)
    keeps = (
        torch.ones_like(numbers, dtype=torch.bool) if counted is None else counted.cpu()[plan.source.cpu()]
    )
    sums = torch.zeros(len(sizes), outputs.shape[1], dtype=torch.float64)
    for start in range(0, len(numbers), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        sums.index_add_(0, numbers[part][keeps[part]], outputs[part].double().cpu()[keeps[part]])
    return sums


def combine(outputs: Tensor, weights: Tensor, position: Tensor) -> Tensor:
    """Each token's outputs times its weights, added in the order of the experts.

    Args:
        outputs: `[assignments, width]`.
        weights: `[tokens, top_k]`.
        position: `[tokens, top_k]`, the row of each token's outputs.

    Returns:
        `[tokens, width]` float32.
    """
    # Rows are sorted by expert: in the order of its rows, a token's experts ascend.
    position, order = position.sort(dim=1)
    ordered = weights.gather(1, order)
    mixed = outputs.new_zeros(len(position), outputs.shape[1], dtype=torch.float32)
    for place in range(position.shape[1]):
        mixed += (
            outputs.index_select(0, position[:, place]) * ordered[:, place, None]
        )  # rounded as stock does it
    return mixed


def outputs_of(
    module: Any, rows: Tensor, plan: Dispatch, held: ExpertWeights, watch: Watch | None = None
) -> Tensor:
    """Return the outputs of each expert for its rows.

    Args:
        module: see `run_expert`.
        rows: `[assignments, width]`, sorted by expert.
        plan: says which rows are of which expert.
        held: of all experts.
        watch: called with the span of each expert and the activations that its output layer reads.

    Returns:
        `[assignments, width]`.
    """
    if watch is None and _has_kernel(rows, held):
        return _grouped(module, rows, held, plan.counts)

    by_number = held.unbind() if torch.is_grad_enabled() else held

    def run(span: Span, own: Tensor) -> Tensor:
        return run_expert(module, own, by_number[span[0]], None if watch is None else partial(watch, span))

    with dot_products(held.up.dtype, plan.sizes):
        return by_expert(run, rows, plan, shared_out=not rows.is_cuda and shares_out(held, plan.sizes))


def shares_out(held: ExpertWeights, counts: Sequence[int]) -> bool:
    """Whether experts with so many rows each are shared out to threads on a CPU, one thread to an expert."""
    return pays(counts, held.up[0].numel() + held.down[0].numel(), held.up.element_size())


def _has_kernel(rows: Tensor, held: ExpertWeights) -> bool:
    return has_grouped_kernel(rows, held.up) and has_grouped_kernel(rows, held.down)


def _grouped(module: Any, rows: Tensor, held: ExpertWeights, counts: Tensor) -> Tensor:
    def product(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return grouped_product(
            given, weight if module.is_transposed else weight.transpose(1, 2), bias, counts
        )

    hidden = _activated(module, product(rows, held.up, held.up_bias))
    outputs = product(hidden, held.down, held.down_bias)
    return _normed(module, outputs)


def _activated(module: Any, hidden: Tensor) -> Tensor:
    found: Tensor = apply_gate(module, hidden) if module.has_gate else module.act_fn(hidden)
    return found


def _normed(module: Any, outputs: Tensor) -> Tensor:
    found: Tensor = module.post_expert_norm(outputs) if module.has_post_expert_norm else outputs
    return found


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    """`[at least rows, out]`."""
    if is_transposed:
        rows = rows.to(weight.dtype)
        return rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    if rows.device.type != "cpu":
        return torch.nn.functional.linear(rows, weight, bias)
    return linear(rows, weight, bias)
