"""What `prunecli share-ffn` costs beside `cp` of its result: time as a ratio, peak resident memory.

    python benchmarks/make_checkpoint.py /data/dense --layers 28 --sparse-step 28 --experts 2 --dtype bfloat16
    python benchmarks/share_ffn.py /data/dense

Whole processes are timed, start-up included, and run in turn, so that the state of the page cache is alike for all.
Merging reads every FFN and writes one, so it moves more bytes than `cp` of the result: `read` is `cat` of the source.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import runs

CASES = (
    "--preset NoDec",
    "--preset SharedEncNoDec --init mean",
    "--preset SharedEncNoDec --init concat --width {half} --keep-units norms",
    "--preset OneWide",
)
"""Plain copies, means, choosing hidden units by their norms, concatenation with new units."""


def main() -> None:
    """Parse, run the rounds, print."""
    options = parse()
    work = Path(options.work or options.checkpoint.resolve().parent) / f"share-ffn-{os.getpid()}"
    work.mkdir()
    weights = sorted(path for path in options.checkpoint.iterdir() if path.suffix in (".safetensors", ".bin"))
    size = sum(path.stat().st_size for path in weights)
    print(f"{options.checkpoint}: {size / 2**30:.2f} GiB, median of {options.rounds} rounds")
    try:
        reading, _ = measure(["cat", *weights], work / "none", options.rounds)
        print(f"  read: {reading:.2f} s")
        for case in CASES:
            compare(case.format(half=options.width), options.checkpoint, work, options.rounds)
    finally:
        shutil.rmtree(work)


def compare(case: str, checkpoint: Path, work: Path, rounds: int) -> None:
    """prunecli against `cp` of what it writes."""
    made, copied = work / "made", work / "copied"
    command = [*runs.PRUNECLI, "share-ffn", checkpoint, "--quiet", "--force", "--dense-only"]
    seconds, peak = measure([*command, *shlex.split(case), "-o", made], made, rounds)
    copying, _ = measure(["cp", "-r", made, copied], copied, rounds)
    size = sum(path.stat().st_size for path in made.iterdir())
    print(
        f"  {case}: {size / 2**30:.2f} GiB written in {seconds:.2f} s, cp {copying:.2f} s "
        f"(ratio {seconds / copying:.2f}), peak {peak / 2**20:.0f} MiB resident"
    )


def measure(command: Sequence[object], output: Path, rounds: int) -> tuple[float, int]:
    """Median seconds and largest resident bytes; `output` is removed before each round."""
    found = []
    for _ in range(rounds):
        shutil.rmtree(output, ignore_errors=True)
        found.append(runs.run(command))
    return statistics.median(ran.seconds for ran in found), max(ran.peak for ran in found)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = runs.parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="of a model with an encoder and a decoder")
    parser.add_argument("--width", type=int, default=4096, help="hidden units of the narrowed FFN")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--work", type=Path, help="directory on the disk to write to; default: beside the checkpoint"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
