"""Experts of the few tokens of a decoding step on a GPU, which is not asked which of them were chosen.

To multiply expert after expert the host must know who has rows: it waits for the device, which then idles until the
next kernel is started, and no CUDA graph can hold the step. Two ways do without, and copy no weights (to gather
`weight[experts]` and multiply that moves each expert three times a row, and takes memory for a copy a row). With B the
bytes of an expert, N experts, a = tokens x top_k rows, of d different experts:

| way | reads of memory | taken |
| --- | --- | --- |
| rows of the weights by their index | d B; a B through the caches | a <= 32 |
| every expert on every token | N B | a >= 2 N: few are without rows; up to 32 tokens: products hide in reading |
| the experts that have rows, in turn | d B, after a wait | else: beside so many bytes a wait is little |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prunecli.modules.grouped import Weights, has_grouped_kernel

MOST_ROWS = 32
"""Rows up to which weights are read by index: each row passes its expert's through the caches."""

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
    rows = len(tokens) * top_k
    pays = _by_index(rows) or (len(tokens) <= MOST_TOKENS and rows >= ROWS_PER_EXPERT * len(weight))
    return pays and tokens.is_cuda and tokens.dtype == weight.dtype and not has_grouped_kernel(tokens, weight)


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
    if _by_index(len(chosen)):
        hidden = activation(_linear_by_index(tokens, token, fc1_weight, fc1_bias, chosen))
        return _linear_by_index(hidden, own, fc2_weight, fc2_bias, chosen)
    every = tokens.expand(len(fc1_weight), -1, -1)
    hidden = activation(torch.baddbmm(fc1_bias.unsqueeze(1), every, fc1_weight.transpose(1, 2)))
    outputs = torch.baddbmm(fc2_bias.unsqueeze(1), hidden, fc2_weight.transpose(1, 2))
    return outputs[chosen, token]


def _by_index(rows: int) -> bool:
    return rows <= MOST_ROWS


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
