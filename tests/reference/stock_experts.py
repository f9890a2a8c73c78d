"""What each expert of a transformers class does: every expert on every token, by the class's own eager forward pass."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from tests.reference.routed_outputs import Token


def every_output(module: Any, hidden: Tensor) -> Tensor:
    """`[experts, tokens, width]`: what each expert makes of each token, before any weight.

    Args:
        module: of experts, of a model whose implementation is "eager".
        hidden: `[tokens, width]`.
    """
    one = hidden.new_ones(len(hidden), 1)
    every = [torch.full((len(hidden), 1), expert, dtype=torch.int64) for expert in range(module.num_experts)]
    return torch.stack([module(hidden, expert, one) for expert in every])


def expert_calls(
    model: Any, modules: dict[str, Any], **inputs: Any
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Name of a module of experts -> the hidden states, experts and weights that a pass of `model` hands to it."""
    calls = {}
    with ExitStack() as hooks:
        for name, module in modules.items():
            hook = module.register_forward_pre_hook(lambda _, args, name=name: calls.update({name: args}))
            hooks.enter_context(hook)
        model(**inputs)
    return calls


def routed_tokens(model: Any, modules: dict[str, Any], **inputs: Any) -> list[list[Token]]:
    """Routing of each token of a pass, module by module."""
    found = []
    for name, (hidden, experts, weights) in expert_calls(model, modules, **inputs).items():
        norms = every_output(modules[name], hidden).norm(dim=-1).T.gather(1, experts)
        found.append([*zip(experts.tolist(), weights.tolist(), norms.tolist(), strict=True)])
    return found


def block_inputs(model: Any, kind: str, **inputs: Any) -> dict[str, tuple[Any, Tensor]]:
    """Name of a block of the class `kind` -> the block, and the hidden states that a pass of `model` hands to it."""
    blocks = {name: block for name, block in model.named_modules() if type(block).__name__ == kind}
    calls = expert_calls(model, blocks, **inputs)
    return {name: (blocks[name], hidden.detach()) for name, (hidden, *_) in calls.items()}


def llama4_tokens(block: Any, hidden: Tensor, top_k: int) -> list[Token]:
    """Routing of each token of `[batch, seq, width]`: g = sigmoid(logit), and ‖E(g x)‖ / g."""
    found = []
    for token in hidden.reshape(-1, hidden.shape[-1]):
        logits = block.router.weight @ token
        experts = logits.sort(descending=True).indices[:top_k].tolist()
        gates = [float(torch.sigmoid(logits[expert])) for expert in experts]
        norms = []
        for expert, gate in zip(experts, gates, strict=True):
            first, second = (gate * token @ block.experts.gate_up_proj[expert]).split(
                block.experts.intermediate_size
            )
            added = (torch.nn.functional.silu(first) * second) @ block.experts.down_proj[expert]
            norms.append(float(added.norm()) / gate)
        found.append((experts, gates, norms))
    return found


def switch_tokens(block: Any, hidden: Tensor, capacity: int) -> list[Token]:
    """Routing of each token of `[batch, seq, width]`: one expert, or none where that has no room left."""
    found = []
    for sequence in hidden:
        taken = [0] * block.experts.num_experts
        for token in sequence:
            gates = (block.router.classifier.weight @ token).softmax(0)
            expert = int(gates.argmax())
            taken[expert] += 1
            if taken[expert] > capacity:
                found.append(([], [], []))
                continue
            module = block.experts[f"expert_{expert}"]
            output = module.wo.weight @ (module.wi.weight @ token).relu()
            found.append(([expert], [float(gates[expert])], [float(output.norm())]))
    return found
