"""Time of one sparse FFN on a CPU against a loop over experts, the stock module, and what the machine allows.

    python benchmarks/sparse_ffn.py [--stock-python ENV/bin/python] [--dtypes float32,bfloat16] [--tokens 4096,5]

The limit is the larger of one dense product pair of the same FLOPs, and one reading of the routed experts' weights by all
cores. All are measured in turn in each round, medians are printed. The stock module of transformers 4.57 (which routes
rightly, unlike 5.x) runs in an environment of its own, in the same minutes, on the same shapes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn import functional

D_MODEL, FFN_DIM, EXPERTS = 1024, 4096, 128

STOCK = """
import json, statistics, sys, time, torch
from transformers import NllbMoeConfig
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP
d_model, ffn, experts, tokens, rounds, threads = map(int, sys.argv[2:])
torch.set_num_threads(threads)
config = NllbMoeConfig(d_model=d_model, num_experts=experts, moe_token_dropout=0.0, encoder_layers=1, decoder_layers=1)
torch.set_default_dtype(getattr(torch, sys.argv[1]))
module = NllbMoeSparseMLP(config, ffn).eval()
x = torch.randn(1, tokens, d_model)
times = []
with torch.inference_mode():
    for _ in range(rounds):
        start = time.perf_counter()
        module(x)
        times.append(time.perf_counter() - start)
print(json.dumps(statistics.median(times[1:])))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stock-python", help="python of an environment with transformers 4.57")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--tokens", default="4096,5")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"{EXPERTS} experts, d_model {D_MODEL}, ffn {FFN_DIM}, {options.threads} threads, torch {torch.__version__}"
    )
    for dtype in options.dtypes.split(","):
        times: dict[int, dict[str, float]] = {}
        module = make(getattr(torch, dtype))
        for tokens in map(int, options.tokens.split(",")):
            times[tokens] = medians(candidates(module, tokens), rounds=6 if tokens > 100 else 30)
        del module
        for tokens, found in times.items():
            if options.stock_python:
                found["stock"] = stock(options.stock_python, dtype, tokens, options.threads)
            report(dtype, tokens, found)


def make(dtype: torch.dtype) -> torch.nn.Module:
    """A sparse FFN with random weights."""
    from prunecli.modules.sparse_ffn import SparseFFN

    torch.manual_seed(0)
    return SparseFFN(D_MODEL, FFN_DIM, EXPERTS, dtype=dtype).eval()


def candidates(module: torch.nn.Module, tokens: int) -> Mapping[str, Callable[[], object]]:
    """What is timed, on the same tokens."""
    from prunecli.modules.grouped import dispatch, expert_spans
    from prunecli.modules.sparse_ffn import route

    hidden = torch.randn(1, tokens, D_MODEL, dtype=module.fc1_weight.dtype)
    fc1, fc1_bias, fc2, fc2_bias = (
        tensor.detach() for tensor in (module.fc1_weight, module.fc1_bias, module.fc2_weight, module.fc2_bias)
    )

    def loop() -> Tensor:
        _, experts, weights = route(module.router(hidden[0]), 2)
        out = torch.zeros_like(hidden[0])
        for expert in experts.unique().tolist():
            rows, rank = torch.where(experts == expert)
            made = functional.relu(functional.linear(hidden[0, rows], fc1[expert], fc1_bias[expert]))
            made = functional.linear(made, fc2[expert], fc2_bias[expert])
            out.index_add_(0, rows, made * weights[rows, rank, None].to(made.dtype))
        return out

    with torch.inference_mode():
        _, chosen, _ = route(module.router(hidden[0]), 2)
    plan = dispatch(chosen, EXPERTS)
    rows = hidden[0][plan.source]
    routed = [expert for expert, _, _ in expert_spans(plan.counts.tolist())]
    blocks = [tensor[expert].view(-1).view(torch.float32) for tensor in (fc1, fc2) for expert in routed]
    pool = ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,))

    def dense() -> Tensor:
        return functional.linear(functional.relu(functional.linear(rows, fc1[0])), fc2[0])

    return {
        "ours": lambda: module(hidden),
        "loop": loop,
        "dense": dense,
        "reading": lambda: list(pool.map(torch.sum, blocks)),
    }


def medians(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, taking turns; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def stock(python: str, dtype: str, tokens: int, threads: int) -> float:
    """Median seconds of the stock module in its own environment."""
    rounds = 4 if tokens > 100 else 15
    sizes = map(str, (D_MODEL, FFN_DIM, EXPERTS, tokens, rounds, threads))
    made = subprocess.run([python, "-c", STOCK, dtype, *sizes], capture_output=True, text=True, check=True)
    return float(json.loads(made.stdout.strip().splitlines()[-1]))


def report(dtype: str, tokens: int, found: Mapping[str, float]) -> None:
    """One line: milliseconds, and ours as ratios."""
    limit = max(found["dense"], found["reading"])
    times = "  ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in found.items())
    against = f"ours/limit {found['ours'] / limit:.2f}  loop/ours {found['loop'] / found['ours']:.2f}"
    if "stock" in found:
        against += f"  stock/ours {found['stock'] / found['ours']:.2f}"
    print(f"{dtype:9} {tokens:5} tokens, ms: {times}  |  {against}", flush=True)


if __name__ == "__main__":
    main()
