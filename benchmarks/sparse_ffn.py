"""Time of one sparse FFN on a CPU against a loop over experts, the stock module, and what the machine allows.

    python benchmarks/sparse_ffn.py [--stock-python ENV/bin/python] [--dtypes float32,bfloat16] [--tokens 4096,5]

The limit is the larger of one dense product pair of the same FLOPs, and one reading of the routed experts' weights by
all cores. All take turns in each round, and medians are printed. The stock module of transformers 4.57 (which routes
rightly, unlike 5.x) runs in an environment of its own, at its turn, on tokens of the same shape. Needs 9 GB of memory
for float32, 5 GB without the stock module.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import runs
import torch
from torch import Tensor
from torch.nn import functional

from prunecli.modules.grouped import dispatch, expert_spans
from prunecli.modules.sparse_ffn import SparseFFN, route

D_MODEL, FFN_DIM, EXPERTS = 1024, 4096, 128

STOCK = """
import sys, time, torch
from transformers import NllbMoeConfig
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP
d_model, ffn, experts, threads = map(int, sys.argv[2:])
torch.set_num_threads(threads)
config = NllbMoeConfig(d_model=d_model, num_experts=experts, moe_token_dropout=0.0)
torch.set_default_dtype(getattr(torch, sys.argv[1]))
module = NllbMoeSparseMLP(config, ffn).eval()
for line in sys.stdin:
    tokens = int(line)
    x, all_real = torch.randn(1, tokens, d_model), torch.zeros(1, 1, 1, tokens)
    with torch.inference_mode():
        start = time.perf_counter()
        module(x, all_real)
        print(time.perf_counter() - start, flush=True)
"""
"""Times one forward pass for each number of tokens that it reads."""


def main() -> None:
    parser = runs.parser(__doc__)
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
        module = make(getattr(torch, dtype))
        with stock(options.stock_python, dtype, options.threads) as timed_elsewhere:
            for tokens in map(int, options.tokens.split(",")):
                rounds = 8 if tokens > 100 else 40
                report(dtype, tokens, medians(candidates(module, tokens), timed_elsewhere, tokens, rounds))


def make(dtype: torch.dtype) -> SparseFFN:
    """A sparse FFN with random weights."""
    torch.manual_seed(0)
    return SparseFFN(D_MODEL, FFN_DIM, EXPERTS).to(dtype).eval()


def candidates(module: SparseFFN, tokens: int) -> Mapping[str, Callable[[], object]]:
    """What is timed, on the same tokens."""
    hidden = torch.randn(1, tokens, D_MODEL, dtype=module.fc1_weight.dtype)
    fc1, fc1_bias, fc2, fc2_bias = (
        tensor.detach() for tensor in (module.fc1_weight, module.fc1_bias, module.fc2_weight, module.fc2_bias)
    )

    def loop() -> Tensor:
        _, experts, weights = route(module.router["classifier"](hidden[0]), 2)
        out = torch.zeros_like(hidden[0])
        for expert in torch.unique(experts).tolist():
            rows, rank = torch.where(experts == expert)
            made = functional.relu(functional.linear(hidden[0, rows], fc1[expert], fc1_bias[expert]))
            made = functional.linear(made, fc2[expert], fc2_bias[expert])
            out.index_add_(0, rows, made * weights[rows, rank, None].to(made.dtype))
        return out

    with torch.inference_mode():
        _, chosen, _ = route(module.router["classifier"](hidden[0]), 2)
    plan = dispatch(chosen, EXPERTS)
    rows = hidden[0][plan.source]
    routed = [expert for expert, _, _ in expert_spans(plan.sizes)]
    blocks = [tensor[expert].view(-1).view(torch.float32) for tensor in (fc1, fc2) for expert in routed]
    pool = ThreadPoolExecutor(torch.get_num_threads(), initializer=work_alone)

    def dense() -> Tensor:
        return functional.linear(functional.relu(functional.linear(rows, fc1[0])), fc2[0])

    return {
        "ours": lambda: module(hidden),
        "loop": loop,
        "dense": dense,
        "reading": lambda: list(pool.map(torch.sum, blocks)),
    }


def work_alone() -> None:
    """Have this thread run torch's operations without help."""
    torch.set_num_threads(1)
    torch.get_num_threads()  # settles it


def medians(
    functions: Mapping[str, Callable[[], object]],
    timed_elsewhere: Callable[[int], float] | None,
    tokens: int,
    rounds: int,
) -> dict[str, float]:
    """Median seconds of each, taking turns; the first two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    if timed_elsewhere is not None:
        times["stock"] = []
    with torch.inference_mode():
        for _ in range(rounds + 2):
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - start)
            if timed_elsewhere is not None:
                times["stock"].append(timed_elsewhere(tokens))
    return {name: statistics.median(found[2:]) for name, found in times.items()}


@contextmanager
def stock(python: str | None, dtype: str, threads: int) -> Iterator[Callable[[int], float] | None]:
    """The stock module in its own environment, waiting for its turns: a function from tokens to seconds."""
    if python is None:
        yield None
        return
    sizes = map(str, (D_MODEL, FFN_DIM, EXPERTS, threads))
    command = [python, "-c", STOCK, dtype, *sizes]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        given, taken = process.stdin, process.stdout

        def seconds(tokens: int) -> float:
            print(tokens, file=given, flush=True)
            return float(taken.readline())

        yield seconds
        given.close()


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
