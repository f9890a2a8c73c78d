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
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Contestant:
    """A command that makes `output` out of nothing, and what it took in each round."""

    name: str
    command: Sequence[str]
    output: Path
    sync: bool = False
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    def run(self) -> None:
        """One round, from a disk at rest."""
        shutil.rmtree(self.output, ignore_errors=True)
        os.sync()
        start = time.perf_counter()
        process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if self.sync:
            subprocess.run(["sync", "-f", str(self.output)], check=True)
        self.seconds.append(time.perf_counter() - start)
        self.processor.append(usage.ru_utime + usage.ru_stime)
        self.peak_bytes.append(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
        if os.waitstatus_to_exitcode(status):
            sys.exit(f"failed: {' '.join(self.command)}")

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


def main() -> None:
    """Parse, run the rounds, print."""
    options = parse()
    work = Path(options.work or options.checkpoint.resolve().parent) / f"prune-experts-{os.getpid()}"
    work.mkdir()
    try:
        prune = [
            sys.executable,
            "-m",
            "prunecli",
            "prune-experts",
            str(options.checkpoint),
            "--quiet",
            "--force",
        ]
        prune += ["--ratio", str(options.ratio)]
        prune += ["--gates", str(options.gates)] if options.gates else ["--metric", "random"]
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


def compare(kind: str, prune: Sequence[str], work: Path, rounds: int) -> tuple[float, float]:
    """prunecli against both kinds of `cp`, in turn; median seconds of prunecli and of the plain `cp`."""
    work.mkdir()
    kept = work / "kept"
    subprocess.run(
        [*prune, "-o", str(kept)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    size = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    copy = ["cp", "-r", str(kept)]
    pruning = Contestant("prunecli", [*prune, "-o", str(work / "made")], work / "made")
    copying = Contestant("cp", [*copy, str(work / "copy")], work / "copy")
    durable = Contestant("cp + sync", [*copy, str(work / "synced")], work / "synced", sync=True)
    contestants = (pruning, copying, durable)
    for turn in range(rounds):
        for contestant in contestants[turn % 3 :] + contestants[: turn % 3]:
            contestant.run()
            shutil.rmtree(contestant.output)
    print(f"{kind}: {size / 2**30:.2f} GiB kept, median of {rounds} rounds")
    for contestant in contestants:
        spread = f"{min(contestant.seconds):.2f} to {max(contestant.seconds):.2f}"
        peak = max(contestant.peak_bytes) / 2**20
        busy = statistics.median(contestant.processor)
        print(
            f"  {contestant.name:10} {contestant.median:6.2f} s ({spread}; {busy:.2f} s of the processor), "
            f"peak {peak:.0f} MiB resident"
        )
    for other in (copying, durable):
        ratios = [mine / theirs for mine, theirs in zip(pruning.seconds, other.seconds, strict=True)]
        print(
            f"  prunecli / {other.name}: {pruning.median / other.median:.2f} of the medians, "
            f"{min(pruning.seconds) / min(other.seconds):.2f} of the shortest, "
            f"{statistics.median(ratios):.2f} round by round"
        )
    shutil.rmtree(work)
    return pruning.median, copying.median


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
