"""Beam search on a CPU beside CTranslate2: the same dense M2M-100, random weights, source tokens and number of tokens.

    python -m venv ct2 && ct2/bin/pip install ctranslate2
    python benchmarks/beside_ctranslate2.py /data/m2m --ctranslate2-python ct2/bin/python --batch 1,8,32 --threads 2
    python benchmarks/beside_ctranslate2.py /data/m2m --ctranslate2-python ct2/bin/python --busy 2 --spins 0,1000

All take turns in one run, each engine in a process of its own, so that a machine that slows down slows all of them
alike; figures are medians. Said too: in how many sentences both engines choose the same tokens in float32, which shows
that they run one model. `--busy N` starts N processes that do nothing but take a core each; `--spins 0,1000`
has prunecli run in turn with each of these `GOMP_SPINCOUNT`s: how long a thread that waits for another keeps its core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import runs

HERE = Path(__file__).resolve().parent
SIZES = {
    "encoder_layers": 6,
    "decoder_layers": 6,
    "d_model": 1024,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "activation_function": "relu",
    "scale_embedding": True,
    "max_position_embeddings": 256,
}
PAUSE = 0.3
"""Seconds between turns, until the threads of the engine before no longer spin."""

SPIN = "while True: pass"
OTHER = "CTranslate2"


class Worker:
    """An engine in its own process: a line of JSON in, one out.

    Args:
        command: that starts it.
        environment: what is set for it beside this process's own.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [*command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def __call__(self, **task: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"{self._process.args!r}: ended")
        return json.loads(answer)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    options = parse()
    checkpoint = made_checkpoint(options)
    with ExitStack() as stack:
        ours = [sys.executable, str(HERE / "beside_ctranslate2.py"), "--serve", str(checkpoint)]
        engine = [options.ctranslate2_python, str(HERE / "beside_ctranslate2_worker.py"), str(checkpoint)]
        threads = str(options.threads)
        workers = {"prunecli": Worker([*ours, threads], {})} if not options.spins else {}
        for count in options.spins:
            workers[f"prunecli, {count} spins"] = Worker([*ours, threads], {"GOMP_SPINCOUNT": str(count)})
        workers[OTHER] = Worker([*engine, threads], {})
        for worker in workers.values():
            stack.enter_context(worker)
        systems = [(name, dtype) for dtype in options.dtypes for name in workers]
        stack.enter_context(busy(options.busy))
        print(
            f"beam {options.beam}, {options.tokens} tokens, {threads} threads, {options.busy} busy neighbours"
        )
        for batch in options.batch:
            report(batch, measure(workers, systems, batch, options), options.tokens)


def made_checkpoint(options: argparse.Namespace) -> Path:
    """The model, made where it is not there yet."""
    directory: Path = options.directory / "model"
    if not (directory / "config.json").is_file():
        changes = {**SIZES, "vocab_size": options.vocabulary}
        command = [sys.executable, str(HERE / "make_checkpoint.py"), str(directory), "--family", "m2m_100"]
        command += [
            word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")
        ]
        subprocess.run([*command, "--dtype", "float32"], check=True, stdout=subprocess.DEVNULL)
        draw_table(directory / "model.safetensors")
    return directory


def draw_table(path: Path) -> None:
    """Draw the table of embeddings anew: rows that repeat, as that script makes them, are tokens of one score."""
    data = np.memmap(path, dtype=np.uint8, mode="r+")
    size = int.from_bytes(data[:8].tobytes(), "little")
    entry = json.loads(data[8 : 8 + size].tobytes())["model.shared.weight"]
    start, end = (8 + size + offset for offset in entry["data_offsets"])
    table = data[start:end].view(np.float32).reshape(entry["shape"])
    generator = np.random.default_rng(0)
    for row in range(0, len(table), 1024):
        block = table[row : row + 1024]
        block[:] = generator.standard_normal(block.shape, dtype=np.float32) * np.float32(0.02)
    data.flush()


def measure(
    workers: Mapping[str, Worker],
    systems: Sequence[tuple[str, str]],
    batch: int,
    options: argparse.Namespace,
) -> dict[tuple[str, str], list[float]]:
    """Seconds of each run of each system; one run before them warms up."""
    drawn = random.Random(0)
    rows = [
        [*(drawn.randrange(10, options.vocabulary) for _ in range(options.source - 1)), 2]
        for _ in range(batch)
    ]
    seconds: dict[tuple[str, str], list[float]] = {system: [] for system in systems}
    chosen = {}
    for run in range(options.runs + 1):
        for name, dtype in systems:
            time.sleep(PAUSE)
            made = workers[name](dtype=dtype, rows=rows, beam=options.beam, tokens=options.tokens)
            if made is None:
                continue
            if run:
                seconds[name, dtype].append(made["seconds"])
            chosen[name, dtype] = made["chosen"]
    exact = [chosen[name, "float32"] for name in (next(iter(workers)), OTHER) if (name, "float32") in chosen]
    if exact:
        same = sum(one == other for one, other in zip(*exact, strict=True))
        print(f"batch {batch}: the same tokens in {same} of {batch} sentences")
    return seconds


def report(batch: int, seconds: Mapping[tuple[str, str], Sequence[float]], tokens: int) -> None:
    """A line for each engine and type."""
    for (name, dtype), taken in seconds.items():
        if not taken:
            print(f"batch {batch}, {dtype}: {name} has none on this processor")
            continue
        rates = [batch * tokens / value for value in (statistics.median(taken), min(taken))]
        line = f"batch {batch}, {dtype}: {name} {rates[0]:.1f} tokens/s, at best {rates[1]:.1f}"
        if name != OTHER and (others := seconds[OTHER, dtype]):
            ratios = [theirs / ours for ours, theirs in zip(taken, others, strict=True)]
            line += f"; speed / {OTHER}'s {statistics.median(ratios):.2f}"
        print(line, flush=True)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Inside, so many processes take a core each."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def serve(checkpoint: Path, threads: int) -> None:
    """prunecli's worker."""
    import torch

    from prunecli.evaluation.workloads import decode
    from prunecli.modules.loading import load_for_decoding

    torch.set_num_threads(threads)
    models: dict[str, Any] = {}
    for line in sys.stdin:
        task = json.loads(line)
        dtype = task["dtype"]
        if dtype not in models:
            models[dtype] = load_for_decoding(checkpoint, device="cpu", dtype=dtype)
        start = time.perf_counter()
        outputs = decode(models[dtype], task["rows"], task["beam"], task["tokens"], pad_id=1)
        taken = time.perf_counter() - start
        print(json.dumps({"seconds": taken, "chosen": [row[1:] for row in outputs]}), flush=True)


def parse() -> argparse.Namespace:
    parser = runs.parser(__doc__)
    parser.add_argument(
        "directory", type=Path, help="the model is made in it where it is not there yet: 1.2 GiB"
    )
    parser.add_argument("--ctranslate2-python", required=True, help="the interpreter that has ctranslate2")
    parser.add_argument("--batch", type=runs.numbers, default=[1, 8, 32])
    parser.add_argument(
        "--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16", "int8"]
    )
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--source", type=int, default=28, help="tokens of a source sentence")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that are generated")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=128112)
    parser.add_argument("--busy", type=int, default=0, help="neighbours that take a core each")
    parser.add_argument("--spins", type=runs.numbers, default=[])
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
