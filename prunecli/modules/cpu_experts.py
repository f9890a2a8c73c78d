"""The experts of one layer on a CPU, without gradients: both layers of an expert at once, no weight copied or packed.

Many experts are shared out: each thread takes the next one with rows, the largest first. Few, as a decoding step has
them, take turns with all of torch's threads: two experts of 5 rows read their weights at 28 GB/s so, on two threads of
their own, which torch's waiting ones disturb, at 11 (float32, d_model 1024, ffn 4096, 4 threads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prunecli.modules.cpu_linear import dot_products, linear
from prunecli.modules.grouped import Span, expert_spans
from prunecli.modules.threads import in_threads, pays

MIN_EXPERTS = 24
"""Experts from which sharing out is as fast or faster, whatever their rows: measured with 2 and with 4 threads."""

Weights = tuple[Tensor, Tensor, Tensor, Tensor]
"""fc1 weight `[experts, ffn, d_model]`, fc1 bias `[experts, ffn]`, fc2 weight `[experts, d_model, ffn]`, fc2 bias."""


def run_experts(
    tokens: Tensor, weights: Weights, counts: Sequence[int], activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """act(x W1 + b1) W2 + b2 of each row by its own expert; no gradients.

    Args:
        tokens: `[assignments, d_model]`, sorted by expert.
        weights: of all experts, in the type of the tokens.
        counts: rows of each expert.
        activation: act.

    Returns:
        `[assignments, d_model]` float32.
    """
    result = torch.empty(tokens.shape, dtype=torch.float32)

    def run(span: Span) -> None:
        expert, start, end = span
        fc1_weight, fc1_bias, fc2_weight, fc2_bias = (tensor[expert] for tensor in weights)
        hidden = activation(linear(tokens[start:end], fc1_weight, fc1_bias))
        result[start:end] = linear(hidden, fc2_weight, fc2_bias)[: end - start]

    spans = expert_spans(counts)
    with dot_products(weights[0].dtype, [end - start for _, start, end in spans]):
        if threads_pay(weights, len(spans), tokens.shape[0]):
            in_threads(run, sorted(spans, key=lambda span: span[1] - span[2]))
        else:
            for span in spans:
                run(span)
    return result


def threads_pay(weights: Weights, experts: int, assignments: int) -> bool:
    """Whether `run_experts` on that many experts and rows goes to threads."""
    per_expert = weights[0][0].numel() + weights[2][0].numel()
    weight_bytes = experts * per_expert * weights[0].element_size()
    return experts >= MIN_EXPERTS and pays(experts, weight_bytes, assignments * per_expert)
