"""Cost of gate statistics of a language model: collecting against the forward pass of transformers' own experts.

Also against every expert on every token, which is how REAP's published code has the norms. All take turns, so that
other work on the machine meets them alike; CPU seconds of this process are counted.

    python benchmarks/collect_texts.py [--experts 64] [--top-k 8] [--tokens 2048]

The model is a Qwen3-MoE with random weights.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import runs
import torch
from torch import Tensor
from torch.nn import functional

from prunecli.methods.experts.batches import StockObserver
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules.stock_experts import expert_modules


def made(options: argparse.Namespace) -> Any:
    """The model, in float32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=options.width,
        moe_intermediate_size=options.ffn,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=options.width // 8,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).eval()


def layers_of(model: Any) -> list[SparseLayer]:
    """What a checkpoint of it would say."""
    found = []
    for number, (name, module) in enumerate(expert_modules(model).items()):
        ids = tuple(range(module.num_experts))
        found.append(SparseLayer(name, "decoder", number, len(ids), "", (), (), ids, len(ids)))
    return found


def every_expert(module: Any, args: tuple[Tensor, ...]) -> None:
    """Each expert on each token, their norms: `[experts, tokens]`."""
    hidden = args[0]
    for expert in range(module.num_experts):
        gate, up = functional.linear(hidden, module.gate_up_proj[expert]).chunk(2, dim=-1)
        functional.linear(module.act_fn(gate) * up, module.down_proj[expert]).float().norm(dim=-1)


def main() -> None:
    parser = runs.parser(__doc__)
    for name, default in (("experts", 64), ("top-k", 8), ("width", 512), ("ffn", 192), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = made(options)
    ids = torch.randint(0, 1024, (4, options.tokens // 4))
    observer = StockObserver(layers_of(model))

    def stock() -> None:
        model.base_model(input_ids=ids, use_cache=False)

    def collecting() -> None:
        with observer.watching(model):
            stock()
        observer.take()

    def all_experts() -> None:
        hooks = [module.register_forward_pre_hook(every_expert) for module in expert_modules(model).values()]
        stock()
        for hook in hooks:
            hook.remove()

    ways = {
        "stock": stock,
        "collecting": collecting,
        "every expert on every token": all_experts,
    }
    with torch.inference_mode():
        turns = runs.in_turns(ways, options.rounds)
    medians = {name: statistics.median(turn.processor for turn in own) for name, own in turns.items()}
    print(
        f"{options.tokens} tokens, {options.experts} experts, top-{options.top_k}, {options.layers} layers, "
        f"one thread, median of {options.rounds} rounds"
    )
    for name, seconds in medians.items():
        print(f"{name}: {seconds:.2f} s, {seconds / medians['stock']:.3f}x")


if __name__ == "__main__":
    main()
