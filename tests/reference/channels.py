"""A decoder over some channels of its residual stream alone, restated slowly: Llama, Granite with its multipliers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def logits(state: Mapping[str, Tensor], config: Any, ids: Sequence[int], channels: Sequence[int]) -> Tensor:
    """`[tokens, vocabulary]` of one text, in double precision.

    Args:
        state: name -> tensor of the whole model.
        channels: the channels that there are; a norm is over these.
    """
    own, head = list(channels), config.head_dim
    heads, pairs = config.num_attention_heads, config.num_key_value_heads
    tokens = len(ids)

    def norm(name: str, states: Tensor) -> Tensor:
        size = (states**2).sum(1, keepdim=True) / len(own)
        scaled = states / (size + config.rms_norm_eps).sqrt()
        return scaled * state[f"{name}.weight"].double()[own]

    def read(name: str, states: Tensor) -> Tensor:
        return states @ state[f"{name}.weight"].double()[:, own].T

    def write(name: str, values: Tensor) -> Tensor:
        return values @ state[f"{name}.weight"].double()[own].T

    def turned(values: Tensor) -> Tensor:
        """Rotary positions of `[tokens, head]`."""
        each = config.rope_parameters["rope_theta"] ** (-torch.arange(0, head, 2).double() / head)
        turns = torch.polar(torch.ones(tokens, head // 2).double(), torch.arange(tokens)[:, None] * each)
        found = torch.complex(*values.chunk(2, 1)) * turns
        return torch.cat([found.real, found.imag], 1)

    def attention(layer: str, states: Tensor) -> Tensor:
        queries, keys, values = (
            read(f"{layer}.self_attn.{name}_proj", states).view(tokens, -1, head) for name in "qkv"
        )
        mixed = []
        for number in range(heads):
            shared = number * pairs // heads
            scores = turned(queries[:, number]) @ turned(keys[:, shared]).T
            scores = scores * getattr(config, "attention_multiplier", head**-0.5)
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
            mixed.append(scores.softmax(-1) @ values[:, shared])
        return write(f"{layer}.self_attn.o_proj", torch.cat(mixed, 1))

    def ffn(layer: str, states: Tensor) -> Tensor:
        gate, up = (read(f"{layer}.mlp.{name}_proj", states) for name in ("gate", "up"))
        return write(f"{layer}.mlp.down_proj", gate * gate.sigmoid() * up)

    table = state["model.embed_tokens.weight"].double()
    states = table[list(ids)][:, own] * getattr(config, "embedding_multiplier", 1)
    residual = getattr(config, "residual_multiplier", 1)
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        states = states + residual * attention(layer, norm(f"{layer}.input_layernorm", states))
        states = states + residual * ffn(layer, norm(f"{layer}.post_attention_layernorm", states))
    found = norm("model.norm", states) @ state["lm_head.weight"].double()[:, own].T
    return found / getattr(config, "logits_scaling", 1)
