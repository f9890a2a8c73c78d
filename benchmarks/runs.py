"""What the scripts share: the parser of their arguments, functions that take turns, commands that are measured."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

MEASURE = """
import json, os, sys, time
start = time.perf_counter()
silent = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
process = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=[silent])
_, status, usage = os.wait4(process, 0)
peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
took = [time.perf_counter() - start, usage.ru_utime + usage.ru_stime, peak, os.waitstatus_to_exitcode(status)]
print(json.dumps(took))
"""
"""Runs a command out of a small process: from a large one it would begin with the peak of that."""
PRUNECLI = (sys.executable, "-m", "prunecli")


class Ran(NamedTuple):
    """What a command took.

    Attributes:
        seconds, processor: of the clock, and of the processor.
        peak: resident bytes.
        status: exit status.
        said: what it wrote on stderr.
    """

    seconds: float
    processor: float
    peak: int
    status: int
    said: str


def run(
    command: Sequence[object], environment: Mapping[str, str] | None = None, *, check: bool = True
) -> Ran:
    """Run a command to its end.

    Args:
        environment: variables beside those of this process.
        check: end this script if the command fails.
    """
    words = [sys.executable, "-S", "-c", MEASURE, *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    ran = Ran._make([*json.loads(done.stdout), done.stderr])
    if check and ran.status:
        sys.exit(f"failed: {' '.join(words[4:])}\n{ran.said}")
    return ran


class Turn(NamedTuple):
    """Seconds of one call of a function, of the clock and of the processor."""

    seconds: float
    processor: float


def in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1
) -> dict[str, list[Turn]]:
    """Call all functions in turn, so that other work on the machine meets them alike; rounds to warm up come before."""
    found: dict[str, list[Turn]] = {name: [] for name in ways}
    for number in range(warm_up + rounds):
        for name, way in ways.items():
            start, busy = time.perf_counter(), time.process_time()
            way()
            if number >= warm_up:
                found[name].append(Turn(time.perf_counter() - start, time.process_time() - busy))
    return found


def median(turns: Sequence[Turn], others: Sequence[Turn] | None = None) -> float:
    """Median seconds of some turns, or of their ratios to `others`, turn by turn."""
    if others is None:
        return statistics.median(turn.seconds for turn in turns)
    return statistics.median(one.seconds / other.seconds for one, other in zip(turns, others, strict=True))


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows the script's first lines as they are."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def numbers(text: str) -> list[int]:
    """1,8 -> [1, 8]."""
    return [*map(int, text.split(","))]
