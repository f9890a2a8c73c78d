"""How near decoding comes to the memory's limit: bytes of weights that each step touches, over the measured bandwidth.

    python benchmarks/make_checkpoint.py /data/moe --layers 24 --experts 26
    python benchmarks/decoding.py /data/moe [/data/pruned ...] --beam 5 --dtype float32

Batch 1. Active bytes are counted in a run of their own, call by call: the weights of each linear layer, the output
layer among them, and of each expert that any beam was routed to. Keys, values and activations are left out, so the
limit is a little too low; the bandwidth is the median of those measured before each run. Several checkpoints run in
turn on the same tokens, so that drift hits them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import runs
import torch
from torch import nn

from prunecli.evaluation.workloads import decode
from prunecli.modules.loading import load_for_decoding
from prunecli.modules.sparse_ffn import Router, SparseFFN

PROBE_BYTES = 1 << 30
"""Read at a time to measure the bandwidth: far more than any cache holds."""


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    models = {
        path.name: load_for_decoding(path, device=options.device, dtype=options.dtype)
        for path in options.checkpoints
    }
    active = {name: active_bytes(model, options) for name, model in models.items()}
    seconds, rates = measure(models, options)
    rate = statistics.median(rates)
    threads = f"{options.threads} threads" if options.device == "cpu" else options.device
    print(f"{options.dtype}, batch 1, beam {options.beam}, {options.tokens} tokens, {threads}, ", end="")
    print(f"bandwidth {rate / 1e9:.1f} GB/s ({min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f})")
    first = seconds[next(iter(seconds))]
    for name, taken in seconds.items():
        median, limit = statistics.median(taken), active[name] / rate
        gain = statistics.median(base / own for base, own in zip(first, taken, strict=True))
        print(
            f"{name}: {options.tokens / median:.2f} tokens/s, {active[name] / options.tokens / 2**30:.2f} GiB a "
            f"step; time / limit {median / limit:.2f}; speed / the first's {gain:.2f}"
        )


def active_bytes(model: Any, options: argparse.Namespace) -> int:
    """Bytes of weights that one `generate` touches, encoder included."""
    touched = 0

    def linear(module: nn.Linear, _args: Any) -> None:
        nonlocal touched
        touched += stored(module.weight)

    def experts(ffn: SparseFFN, _gates: torch.Tensor, chosen: torch.Tensor) -> None:
        nonlocal touched
        weights = [
            weight for name, weight in ffn.named_parameters() if name.startswith(("fc1_weight", "fc2_weight"))
        ]
        each = sum(map(stored, weights)) // ffn.num_experts
        touched += each * len(set(chosen.flatten().tolist()))

    with watched(model, linear, experts):
        generate(model, options)
    return touched


def stored(weight: torch.Tensor) -> int:
    """Its bytes, also where its layout is a library's own."""
    return weight.numel() * weight.element_size()


@contextmanager
def watched(model: Any, linear: Any, experts: Any) -> Iterator[None]:
    """Inside, every call of a linear layer and every routing is told."""
    handles, layers = [], []
    for module in model.modules():
        if isinstance(module, SparseFFN):
            layers.append(module)
            module.observer = partial(experts, module)
        elif isinstance(module, nn.Linear) and not isinstance(module, Router):
            handles.append(module.register_forward_pre_hook(linear))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for ffn in layers:
            ffn.observer = None


def generate(model: Any, options: argparse.Namespace) -> None:
    """Decode one random sentence to a fixed length."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (1, options.source), generator=generator)
    decode(model, ids.tolist(), options.beam, options.tokens, pad_id=0)


def measure(
    models: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each run, after one that warms up, and the bandwidth before each."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    rates = []
    for run in range(options.runs + 1):
        for name, model in models.items():
            rates.append(bandwidth(options.device))
            start = time.perf_counter()
            generate(model, options)
            if run:
                seconds[name].append(time.perf_counter() - start)
    return seconds, rates


def bandwidth(device: str) -> float:
    """Bytes a second that a sum reads; the best of a few."""
    values = torch.ones(PROBE_BYTES // 4, device=device)

    def seconds() -> float:
        start = time.perf_counter()
        values.sum().item()
        return time.perf_counter() - start

    return PROBE_BYTES / min(seconds() for _ in range(3))


def parse() -> argparse.Namespace:
    parser = runs.parser(__doc__)
    parser.add_argument("checkpoints", type=Path, nargs="+", help="the baseline first")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--source", type=int, default=28, help="tokens of the source sentence")
    parser.add_argument("--tokens", type=int, default=28, help="tokens that are generated")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


if __name__ == "__main__":
    main()
