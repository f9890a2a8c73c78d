"""Experts of the few tokens of a decoding step on a GPU, which is not asked which of them were chosen.

To multiply expert after expert the host must know who has rows: it waits for the device, which then idles until the
next kernel is started, and no CUDA graph can hold the step. Three ways do without. With B the bytes of an expert, N
experts, a = tokens x top_k rows, of d different experts:

| way | moved in memory | taken |
| --- | --- | --- |
| rows of the weights by their index | d B; a B through the caches | a <= 32; not in bfloat16, for want of a kernel |
| every expert on every token | N B | a >= 2 N: few are without rows; up to 32 tokens: products hide in reading |
| the weights of each row, gathered | 3 a B, and memory for a B | a <= 32, and 64 MiB are moved at most |
| the experts that have rows, in turn | d B, after a wait | else: beside so many bytes a wait is little |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prunecli.modules.grouped import Weights, has_grouped_kernel

MOST_ROWS = 32
"""Rows up to which weights are read by index: each row passes its expert's through the caches."""

MOST_MOVED = 64 << 20
"""Bytes that move in about the time of a wait and of the kernels after it, started one by one: 40 us at 1.6 TB/s."""

INDEXED = (torch.float32, torch.float16)
"""Types that torch has the kernel for which reads rows by index on a GPU."""

MOST_TOKENS = 32
"""Tokens up to which a GPU multiplies a matrix about as fast as it reads it, without tensor cores too."""

ROWS_PER_EXPERT = 2
"""Rows for each expert from which few have none: with random choices one in seven."""


def are_few(tokens: Tensor, top_k: int, weight: Tensor) -> bool:
    """Whether `run_few` is the way for these: on a GPU, where no kernel multiplies all experts at once.

    Args:
        tokens: `[tokens, in]`, in the type at work.
        top_k: experts of each.
        weight: `[num_experts, out, in]`.
    """
    if not tokens.is_cuda or tokens.dtype != weight.dtype or has_grouped_kernel(tokens, weight):
        return False  # first of all: on a CPU a weight in int8 is no tensor
    rows = len(tokens) * top_k
    takes_every = len(tokens) <= MOST_TOKENS and rows >= ROWS_PER_EXPERT * len(weight)
    return takes_every or _are_few_rows(rows, weight)


def _are_few_rows(rows: int, weight: Tensor) -> bool:
    moved = 3 * rows * 2 * weight[0].numel() * weight.element_size()
    return rows <= MOST_ROWS and (weight.dtype in INDEXED or moved <= MOST_MOVED)


def run_few(
    tokens: Tensor, experts: Tensor, weights: Weights, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """act(x W1 + b1) W2 + b2 of each token by each of its experts; no gradients.

    Args:
        tokens: `[tokens, d_model]`, in the type of the weights.
        experts: `[tokens, top_k]` int64.
        weights: of all experts, contiguous.
        activation: act.

    Returns:
        `[tokens * top_k, d_model]`, the experts of a token one after another.
    """
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = weights
    count, top_k = experts.shape
    chosen = experts.reshape(-1)
    own = torch.arange(count * top_k, device=tokens.device)
    token = own // top_k
    if _are_few_rows(len(chosen), fc1_weight):
        linear = _linear_by_index if fc1_weight.dtype in INDEXED else _linear_gathered
        hidden = activation(linear(tokens, token, fc1_weight, fc1_bias, chosen))
        return linear(hidden, own, fc2_weight, fc2_bias, chosen)
    every = tokens.expand(len(fc1_weight), -1, -1)
    hidden = activation(torch.baddbmm(fc1_bias.unsqueeze(1), every, fc1_weight.transpose(1, 2)))
    outputs = torch.baddbmm(fc2_bias.unsqueeze(1), hidden, fc2_weight.transpose(1, 2))
    return outputs[chosen, token]


def _linear_by_index(inputs: Tensor, source: Tensor, weight: Tensor, bias: Tensor, chosen: Tensor) -> Tensor:
    """`W_e x + b_e` for each row, e its `chosen` expert and x that of `inputs` which `source` names: `[rows, out]`.

    The gradient of a bag of embeddings with respect to the weights of its samples is what this asks for: products of
    rows of one matrix with rows of another, both named by indices. torch has a kernel for it, which rounds each product
    of two values to their type and adds up in float32. All products of one row of the weights are next to each
    other, so that it comes from memory once, however many tokens have its expert.
    """
    out, width = weight.shape[1:]
    named = torch.arange(out, device=chosen.device).unsqueeze(1) + chosen * out
    bags = source.expand(out, -1).reshape(-1)
    products = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        inputs, weight.view(-1, width), named.view(-1), bags, bags, 0
    )
    made: Tensor = bias.index_select(0, chosen) + products.view(out, len(chosen)).t()
    return made.contiguous()


def _linear_gathered(inputs: Tensor, source: Tensor, weight: Tensor, bias: Tensor, chosen: Tensor) -> Tensor:
    """The same, with a copy of the weights for each row."""
    rows = inputs.index_select(0, source).unsqueeze(2)
    made = torch.baddbmm(bias.index_select(0, chosen).unsqueeze(2), weight.index_select(0, chosen), rows)
    return made.squeeze(2)
