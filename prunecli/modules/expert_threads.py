"""The experts of one layer on a CPU, without gradients: whole experts in parallel, each on one thread.

A product of a few dozen rows is too small to spread over all cores, and one after the other the experts leave the
memory's bandwidth unused. Whole experts do not wait for each other: each thread takes the next expert with rows, the
largest first, and runs both of its layers. No weight is copied or packed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn import functional

from prunecli.modules.grouped import expert_spans

MIN_WEIGHT_BYTES = 8 << 20
MIN_PRODUCTS = 1 << 26
"""Below both of these bytes read and multiply-adds, handing work to threads costs more than it saves."""

Span = tuple[int, int, int]
"""An expert, its first row, its end row."""

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

    Returns:
        `[assignments, d_model]`.
    """
    result = torch.empty_like(tokens)
    spans = expert_spans(counts)
    if not _pays(tokens, weights, spans):
        for span in spans:
            _run(tokens, weights, span, activation, result)
        return result
    waiting = iter(sorted(spans, key=lambda span: span[1] - span[2]))
    lock = threading.Lock()
    inference = torch.is_inference_mode_enabled()

    def work() -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            for span in _taking(waiting, lock):
                _run(tokens, weights, span, activation, result)

    threads = torch.get_num_threads()
    pool = _pool(threads)
    for done in [pool.submit(work) for _ in range(min(threads, len(spans)))]:
        done.result()
    return result


def _pays(tokens: Tensor, weights: Weights, spans: Sequence[Span]) -> bool:
    """Whether threads are worth their while for these rows."""
    if torch.get_num_threads() == 1 or len(spans) < 2:
        return False
    per_expert = weights[0][0].numel() + weights[2][0].numel()
    read = len(spans) * per_expert * weights[0].element_size()
    return read >= MIN_WEIGHT_BYTES or tokens.shape[0] * per_expert >= MIN_PRODUCTS


def _taking(waiting: Iterator[Span], lock: threading.Lock) -> Iterator[Span]:
    while True:
        with lock:
            span = next(waiting, None)
        if span is None:
            return
        yield span


def _run(
    tokens: Tensor, weights: Weights, span: Span, activation: Callable[[Tensor], Tensor], result: Tensor
) -> None:
    expert, start, end = span
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = (tensor[expert] for tensor in weights)
    hidden = activation(functional.linear(tokens[start:end], fc1_weight, fc1_bias))
    torch.addmm(fc2_bias, hidden, fc2_weight.t(), out=result[start:end])


_pools: dict[int, ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def _pool(threads: int) -> ThreadPoolExecutor:
    """One pool per number of threads; its threads run torch's operations alone."""
    with _pools_lock:
        if threads not in _pools:
            made = ThreadPoolExecutor(threads, "expert", initializer=torch.set_num_threads, initargs=(1,))
            ready = threading.Barrier(threads + 1)
            for _ in range(threads):
                made.submit(ready.wait)
            ready.wait()
            # A thread's setting is also the default of threads to come: put back the caller's.
            torch.set_num_threads(threads)
            _pools[threads] = made
        return _pools[threads]
