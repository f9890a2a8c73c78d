"""`prunecli prune-experts` of a mixture-of-experts language model beside `cp`, and opening a larger one.

    python benchmarks/prune_mixture.py /data/scratch --size 8GB --ratio 0.25

In the folder, which is made and deleted again: a Qwen3-MoE of random weights in bfloat16, 48 layers of 128 experts, is
pruned by turns with `cp` of what is kept (`prune_experts.py`, whole processes with their peak memory); then the headers
of 58 layers of 256 experts, 45,000 tensors, are opened and checked. Takes three times the size on the disk.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import runs

from prunecli.tensors.quantities import parse_size

HERE = Path(__file__).parent
WIDTH, LAYERS, EXPERTS = 512, 48, 128
OPENED = {
    "num_hidden_layers": 58,
    "num_experts": 256,
    "hidden_size": 8,
    "moe_intermediate_size": 8,
    "head_dim": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
}
OPENING = """
import sys, time
from pathlib import Path
start = time.perf_counter()
from prunecli.model.checkpoint import open_model
imported = time.perf_counter()
with open_model(Path(sys.argv[1])) as checkpoint:
    checkpoint.check()
    print(len(checkpoint.tensors), time.perf_counter() - imported, time.perf_counter() - start, time.process_time())
"""


def sizes_of(nbytes: int, layers: int, experts: int) -> dict[str, int]:
    """Of a Qwen3-MoE in bfloat16 whose experts take so many bytes."""
    return {
        "num_hidden_layers": layers,
        "num_experts": experts,
        "hidden_size": WIDTH,
        "moe_intermediate_size": nbytes // (layers * experts * 3 * WIDTH * 2),
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32_000,
    }


def main() -> None:
    """Make, prune, open, delete."""
    options = parse()
    sizes = sizes_of(parse_size(options.size), LAYERS, EXPERTS)
    with made(options.work / "mixture", sizes, "bfloat16") as checkpoint:
        pruning = [str(HERE / "prune_experts.py"), str(checkpoint), "--ratio", str(options.ratio)]
        run([*pruning, "--rounds", str(options.rounds)])
    with made(options.work / "headers", OPENED, "bfloat16") as checkpoint:
        opened = [run(["-c", OPENING, str(checkpoint)], shown=False).split() for _ in range(options.rounds)]
    tensors, seconds, whole, busy = (
        statistics.median(map(float, column)) for column in zip(*opened, strict=True)
    )
    print(
        f"{tensors:,.0f} tensors opened and checked in {seconds:.2f} s, {whole:.2f} s with the imports "
        f"({busy:.2f} s of the processor; median of {options.rounds})"
    )


@contextmanager
def made(directory: Path, sizes: dict[str, int], dtype: str) -> Iterator[Path]:
    """A checkpoint with these values in its config.json, within the block."""
    changes = [
        f"--set={key}={value}" for key, value in (sizes | {"num_local_experts": sizes["num_experts"]}).items()
    ]
    try:
        run(
            [
                str(HERE / "make_checkpoint.py"),
                str(directory),
                "--family",
                "qwen3_moe",
                "--dtype",
                dtype,
                *changes,
            ]
        )
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run(arguments: list[str], *, shown: bool = True) -> str:
    """What Python prints of these arguments."""
    result = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    if shown:
        print(result.stdout, end="", flush=True)
    return result.stdout


def parse() -> argparse.Namespace:
    """The command line."""
    parser = runs.parser(__doc__)
    parser.add_argument("work", type=Path, help="folder on the disk to measure")
    parser.add_argument("--size", default="8GB", help="of the pruned checkpoint's experts")
    parser.add_argument("--ratio", type=float, default=0.25, help="fraction of the experts to remove")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
