"""What `prunecli prune-experts` costs beside `cp` of the bytes that it keeps: time as a ratio, peak resident memory.

    python benchmarks/make_checkpoint.py /data/random --dtype float32
    python benchmarks/prune_experts.py /data/random --ratio 0.5 --dtype float16

Whole processes are timed, start-up included, and run in turn, so that the state of page cache and disk is alike for
all. Neither waits for the disk, `cp + sync` does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import runs


def main() -> None:
    """Parse, run the rounds, print."""
    options = parse()
    work = Path(options.work or options.checkpoint.resolve().parent) / f"prune-experts-{os.getpid()}"
    work.mkdir()
    try:
        prune = [*runs.PRUNECLI, "prune-experts", options.checkpoint, "--quiet", "--force"]
        prune += ["--ratio", options.ratio]
        prune += ["--gates", options.gates] if options.gates else ["--metric", "random"]
        kinds = {
            "as stored": prune,
            **({options.dtype: [*prune, "--dtype", options.dtype]} if options.dtype else {}),
        }
        uncast: float | None = None
        for number, (kind, command) in enumerate(kinds.items()):
            pruning, copying = compare(kind, command, work / str(number), options.rounds)
            if uncast is not None:
                print(f"  prunecli / cp of these tensors as stored: {pruning / uncast:.2f} of the medians")
            uncast = copying if uncast is None else uncast
    finally:
        shutil.rmtree(work)


def compare(kind: str, prune: Sequence[object], work: Path, rounds: int) -> tuple[float, float]:
    """prunecli against both kinds of `cp`, in turn; median seconds of prunecli and of the plain `cp`."""
    work.mkdir()
    kept, made = work / "kept", work / "made"
    runs.run([*prune, "-o", kept])
    size = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    copy = ["cp", "-r", kept, made]
    durable = ["sh", "-c", f"cp -r '{kept}' '{made}' && sync -f '{made}'"]
    commands: dict[str, Sequence[object]] = {
        "prunecli": [*prune, "-o", made],
        "cp": copy,
        "cp + sync": durable,
    }
    names, found = [*commands], {name: list[runs.Ran]() for name in commands}
    for turn in range(rounds):
        for name in names[turn % 3 :] + names[: turn % 3]:
            os.sync()  # from a disk at rest
            found[name].append(runs.run(commands[name]))
            shutil.rmtree(made)
    print(f"{kind}: {size / 2**30:.2f} GiB kept, median of {rounds} rounds")
    seconds = {name: [ran.seconds for ran in own] for name, own in found.items()}
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    for name, own in found.items():
        spread = f"{min(seconds[name]):.2f} to {max(seconds[name]):.2f}"
        busy = statistics.median(ran.processor for ran in own)
        print(
            f"  {name:10} {medians[name]:6.2f} s ({spread}; {busy:.2f} s of the processor), "
            f"peak {max(ran.peak for ran in own) / 2**20:.0f} MiB resident"
        )
    pruning = seconds["prunecli"]
    for other in names[1:]:
        ratios = [mine / theirs for mine, theirs in zip(pruning, seconds[other], strict=True)]
        print(
            f"  prunecli / {other}: {medians['prunecli'] / medians[other]:.2f} of the medians, "
            f"{min(pruning) / min(seconds[other]):.2f} of the shortest, "
            f"{statistics.median(ratios):.2f} round by round"
        )
    shutil.rmtree(work)
    return medians["prunecli"], medians["cp"]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = runs.parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--gates", type=Path, help="gate statistics; default: experts drawn at random")
    parser.add_argument("--ratio", type=float, default=0.5, help="fraction of the experts to remove")
    parser.add_argument("--dtype", help="measure this cast too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--work", type=Path, help="directory on the disk to write to; default: beside the checkpoint"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
