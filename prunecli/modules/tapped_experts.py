"""Experts of stock classes, observed; of two classes too that let nobody run their experts for them.

Llama 4 multiplies a token by its weight before the expert reads it, so that what an expert E adds to the layer's output
is E(g x). Its output f before the weight is taken to be E(g x) / g: then g‖f‖ is the norm of what it adds, as it is in
all other families (2510.13999, eq. 9). The stock class has every expert compute every token, most of them times 0; here
the chosen ones do.

Switch Transformers picks one expert a token, which takes `expert_capacity` tokens of a sequence; further ones pass the
layer by, and are not routed.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.modules.grouped import dispatch
from prunecli.modules.stock_experts import (
    ExpertUse,
    ExpertWeights,
    combine,
    norms_of,
    outputs_of,
    own_experts,
)


@contextmanager
def observed_experts(model: Any) -> Iterator[dict[str, Any]]:
    """`own_experts`, and its like for the classes that run experts in ways of their own.

    Yields:
        Name -> module of experts, with `num_experts`; see `own_experts`.

    Raises:
        UnsupportedModelError: the model's class does not let its experts be observed.
    """
    blocks = {name: module for name, module in model.named_modules() if type(module).__name__ in _TAPS}
    if not blocks:
        with own_experts(model) as modules:
            yield modules
        return
    with ExitStack() as undone:
        for block in blocks.values():
            undone.callback(setattr, block.experts, "observer", None)
            _TAPS[type(block).__name__](block, undone)
        yield {f"{name}.experts": block.experts for name, block in blocks.items()}


def _tap_llama4(block: Any, undone: ExitStack) -> None:
    undone.callback(delattr, block, "forward")
    block.forward = partial(_run_llama4, block)


def _run_llama4(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The block's forward pass, each expert on its own tokens; the output and the router's logits."""
    hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = block.router(hidden)
    experts = torch.topk(logits, block.router.top_k, dim=1).indices
    weights = scores.gather(1, experts)
    plan = dispatch(experts, block.experts.num_experts)
    gates = torch.empty_like(weights).reshape(-1).scatter_(0, plan.position.reshape(-1), weights.reshape(-1))
    rows = hidden.index_select(0, plan.source) * gates.unsqueeze(-1)
    held = ExpertWeights(block.experts.gate_up_proj, block.experts.down_proj)
    described = SimpleNamespace(
        has_gate=False,
        act_fn=partial(_gated, block.experts.act_fn),
        is_transposed=True,
        has_post_expert_norm=False,
    )
    observer: Callable[[ExpertUse], None] | None = getattr(block.experts, "observer", None)
    outputs = outputs_of(described, rows, plan, held)
    if observer is not None:
        given, added = weights.float(), norms_of(outputs)[plan.position]
        observer(ExpertUse(experts, weights, torch.where(given > 0, added / given, added)))
    mixed: Tensor = block.shared_expert(hidden)
    return mixed + combine(outputs, torch.ones_like(weights), plan.position).to(mixed.dtype), logits


def _gated(activation: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return up * activation(gate)


def _tap_switch(block: Any, undone: ExitStack) -> None:
    """Hooks on each expert, and one on all of them, which is called after these."""
    norms = {}

    def keep(number: int, _expert: nn.Module, _args: Any, output: Tensor) -> None:
        norms[number] = norms_of(output)

    def observe(module: Any, args: tuple[Tensor, Tensor, Tensor], _output: Tensor) -> None:
        observer: Callable[[ExpertUse], None] | None = getattr(module, "observer", None)
        _, chosen, weights = args  # [tokens, 1, experts], 0 or 1, and [tokens, 1]
        found = weights.new_zeros(weights.shape, dtype=torch.float32)
        for number, norm in norms.items():
            found[chosen[:, 0, number] == 1, 0] = (
                norm  # in the order of the tokens, as the expert is given them
            )
        norms.clear()
        if observer is not None:
            observer(ExpertUse(chosen.argmax(dim=-1), weights, found, chosen.any(dim=-1)))

    for number in range(block.experts.num_experts):
        expert = block.experts[f"expert_{number}"]
        undone.enter_context(expert.register_forward_hook(partial(keep, number)))
    undone.enter_context(block.experts.register_forward_hook(observe))


_TAPS = {
    "Llama4TextMoe": _tap_llama4,
    "SwitchTransformersSparseMLP": _tap_switch,
}
"""Class of a block -> what lets its experts be observed, until the `ExitStack` is closed."""
