"""Linear layers of many experts over tokens sorted by expert: only the routed tokens are computed.

`tokens` are `[assignments, in]`, one row per chosen expert of a token, sorted by expert; `counts` says how many rows
each expert has. Nothing is dropped, and an expert without rows costs nothing.

On a CPU whole experts are shared out to threads, each of which runs torch's operations alone: they do not wait for each
other, as torch's own threads do after each product.

A GPU that has no kernel for all experts at once runs one after another; the host waits to know which have rows.
For the few tokens of a decoding step, `run_few` does without that wait.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

MIN_EXPERTS = 24
"""Experts from which sharing out is as fast or faster, whatever their rows: measured with 2 and with 4 threads.

Fewer, as a decoding step has them, take turns with all of torch's threads: two experts of 5 rows read their weights at
28 GB/s so, on two threads of their own, which torch's waiting ones disturb, at 11 (float32, d_model 1024, ffn 4096, 4
threads).
"""

MIN_WEIGHT_BYTES = 8 << 20
MIN_PRODUCTS = 1 << 26
"""Below both of these bytes read and multiply-adds, handing work to threads costs more than it saves."""

GATHERED_ROWS = 32
GATHERED_BYTES = 64 << 20
"""Rows and bytes moved up to which each row's weights are gathered: 64 MiB move in about the time of a wait and the
kernels after it, started one by one (40 us at 1.6 TB/s)."""

EVERY_TOKENS = 32
"""Tokens up to which a GPU multiplies a matrix about as fast as it reads it, without tensor cores too."""

ROWS_PER_EXPERT = 2
"""Rows for each expert from which few have none: with random choices one in seven."""

GROUPED_ON = (9, 10)
"""Major compute capabilities that torch's grouped product has a kernel for."""

Weights = tuple[Tensor, Tensor, Tensor, Tensor]
"""fc1 weight `[experts, ffn, d_model]`, fc2 weight `[experts, d_model, ffn]`, fc1 bias `[experts, ffn]`, fc2 bias."""

Span = tuple[int, int, int]
"""An expert, its first row, its end row."""

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Which rows go to which expert.

    Attributes:
        source: `[assignments]` int64, the token of each row, sorted by expert.
        position: `[tokens, top_k]` int64, the row of each token's ranked choice: the inverse of `source`.
        counts: `[num_experts]` int64, rows of each expert, on the rows' device.
    """

    source: Tensor
    position: Tensor
    counts: Tensor

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each expert, on the host, which waits for a GPU the first time."""
        return tuple(self.counts.tolist())


def dispatch(experts: Tensor, num_experts: int) -> Dispatch:
    """Sort the assignments `experts` `[tokens, top_k]` by expert; ties keep the order of the tokens."""
    top_k = experts.shape[1]
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel(), device=order.device)
    # A bincount waits for a GPU, twice.
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    return Dispatch(order // top_k, position.view_as(experts), counts)


def grouped_product(tokens: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """torch's own grouped product, where `has_grouped_kernel`: `[assignments, out]`.

    Args:
        tokens: `[assignments, in]`, sorted by expert.
        weight: `[num_experts, in, out]`.
        bias: `[num_experts, out]`, or None.
        counts: `[num_experts]` int64 rows per expert.
    """
    if weight.requires_grad:
        # On Blackwell torch leaves what was in memory there (pytorch/pytorch#172439).
        empty = (counts == 0)[:, None, None]
        weight.register_hook(lambda gradient: gradient.masked_fill(empty, 0))  # type: ignore[no-untyped-call]
    product: Tensor = functional.grouped_mm(tokens, weight, offs=counts.cumsum(0).to(torch.int32))
    if bias is None:
        return product
    return product + bias.repeat_interleave(counts, dim=0, output_size=tokens.shape[0])


def expert_spans(sizes: Sequence[int]) -> list[Span]:
    """`(expert, first row, end row)` of each expert that has rows."""
    bounds = pairwise(accumulate(sizes, initial=0))
    return [(expert, start, end) for expert, (start, end) in enumerate(bounds) if end > start]


def has_grouped_kernel(tokens: Tensor, weight: Tensor) -> bool:
    """Whether torch's own grouped product is fast on these tensors: bfloat16, rows of 16 bytes, a GPU made for it.

    Elsewhere torch multiplies expert after expert, empty ones too.
    """
    return (
        tokens.dtype == torch.bfloat16
        and all(size * tokens.element_size() % 16 == 0 for size in weight.shape[1:])
        and multiplies_groups(tokens.device)
    )


def multiplies_groups(device: torch.device) -> bool:
    """Whether torch has a kernel for grouped products in bfloat16 there: of Hopper and of data centres' Blackwell."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in GROUPED_ON


def by_expert(
    run: Callable[[Span, Tensor], Tensor], rows: Tensor, plan: Dispatch, *, shared_out: bool
) -> Tensor:
    """Return the outputs of `run` for the rows of each expert that has any, `[assignments, width]` as `rows`.

    Args:
        shared_out: whether each thread takes the next expert, the largest first; else they come one by one, as where
            gradients are enabled, which threads would not compute.
    """
    spans = expert_spans(plan.sizes)
    if torch.is_grad_enabled() and spans:  # the gradient of a slice would be as large as all rows
        parts = torch.split(rows, [end - start for _, start, end in spans])
        return torch.cat([run(span, part) for span, part in zip(spans, parts, strict=True)])
    outputs = torch.empty_like(rows)

    def fill(span: Span) -> None:
        _, start, end = span
        outputs[start:end] = run(span, rows[start:end])

    if shared_out:
        in_threads(fill, sorted(spans, key=lambda span: span[1] - span[2]))
    else:
        for span in spans:
            fill(span)
    return outputs


def pays(sizes: Sequence[int], per_expert: int, itemsize: int) -> bool:
    """Whether experts on a CPU are shared out to threads, one thread to an expert.

    Args:
        sizes: rows of each expert.
        per_expert: weights of an expert, without biases.
        itemsize: bytes of a weight.
    """
    experts = sum(size > 0 for size in sizes)
    is_work = experts * per_expert * itemsize >= MIN_WEIGHT_BYTES or sum(sizes) * per_expert >= MIN_PRODUCTS
    return is_work and experts >= MIN_EXPERTS and torch.get_num_threads() > 1


def in_threads(function: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call `function` on each item, without gradients, in `torch.get_num_threads()` threads, in any order.

    Raises:
        Exception: the first one that a call raised; items not yet begun are left out then.
    """
    waiting = deque(items)
    # Tensors of inference mode can be used in inference mode alone: the threads make those that the caller can use.
    mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad

    def work() -> None:
        with mode():
            while waiting:
                try:
                    item = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                function(item)

    count = torch.get_num_threads()
    threads = [_pool(count, os.getpid()).submit(work) for _ in range(min(count, len(items)))]
    try:
        for thread in threads:
            thread.result()
    finally:  # after an interrupt or a failure, the threads stop after the items they are at
        waiting.clear()
        wait(threads)  # what they use may be freed next


@cache
def _pool(threads: int, _process: int) -> ThreadPoolExecutor:
    """One pool per number of threads and per process (a fork copies no threads)."""
    return lone_threads(threads, "expert")


def lone_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of threads, all begun, each of which runs torch's operations alone."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, name, initializer=_work_alone)
    ready = threading.Barrier(count + 1)
    for _ in range(count):
        pool.submit(ready.wait)
    ready.wait()
    # A thread's setting is also the default of threads to come: put back the caller's.
    torch.set_num_threads(before)
    return pool


def _work_alone() -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # a thread's first look replaces its setting by the default: look while that is 1


def are_few(tokens: Tensor, top_k: int, weight: Tensor) -> bool:
    """Whether to use `run_few`: on a GPU, where no kernel multiplies all experts at once.

    Args:
        tokens: `[tokens, in]`, in the type that is computed in.
        top_k: experts of each.
        weight: `[num_experts, out, in]`.
    """
    if not tokens.is_cuda or tokens.dtype != weight.dtype or has_grouped_kernel(tokens, weight):
        return False  # first of all: on a CPU a weight in int8 is no tensor
    rows = len(tokens) * top_k
    takes_every = len(tokens) <= EVERY_TOKENS and rows >= ROWS_PER_EXPERT * len(weight)
    return takes_every or _gathers(rows, weight)


def _gathers(rows: int, weight: Tensor) -> bool:
    """Whether two matrices of each row's expert are gathered: they are read, written, and read again."""
    return rows <= GATHERED_ROWS and 3 * rows * 2 * weight[0].nbytes <= GATHERED_BYTES


def run_few(
    tokens: Tensor, experts: Tensor, weights: Weights, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """act(x W1 + b1) W2 + b2 of each token by each of its experts; no gradients.

    The weights of each row are gathered, or every expert multiplies every token: the host need not know who has rows.

    Args:
        tokens: `[tokens, d_model]`, in the type of the weights.
        experts: `[tokens, top_k]` int64.
        weights: of all experts, contiguous.
        activation: act.

    Returns:
        `[tokens * top_k, d_model]`, the experts of a token one after another.
    """
    chosen = experts.reshape(-1)
    token = torch.arange(len(chosen), device=tokens.device) // experts.shape[1]
    if _gathers(len(chosen), weights[0]):
        rows = tokens.index_select(0, token).unsqueeze(2)
        fc1_weight, fc2_weight, fc1_bias, fc2_bias = (tensor.index_select(0, chosen) for tensor in weights)
        hidden = activation(torch.baddbmm(fc1_bias.unsqueeze(2), fc1_weight, rows))
        return torch.baddbmm(fc2_bias.unsqueeze(2), fc2_weight, hidden).squeeze(2)
    fc1_weight, fc2_weight, fc1_bias, fc2_bias = weights
    every = tokens.expand(len(fc1_weight), -1, -1)
    hidden = activation(torch.baddbmm(fc1_bias.unsqueeze(1), every, fc1_weight.transpose(1, 2)))
    outputs = torch.baddbmm(fc2_bias.unsqueeze(1), hidden, fc2_weight.transpose(1, 2))
    return outputs[chosen, token]
