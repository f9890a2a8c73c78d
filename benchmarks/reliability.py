"""How prunecli takes damaged files and kills: fuzzing rounds and kill rounds through the real command line.

    python benchmarks/reliability.py --minutes 5 --kills 100 --fresh-kills 10 --seed 1

A fuzzing round damages files of a tiny checkpoint, statistics, states, results, recipes or text, runs a command in this
process, and checks its exit status, its messages, its outputs and its inputs. A kill round starts a writing command,
sends SIGKILL, SIGTERM or SIGINT at a random moment, looks at what is there, and runs the command again. Every round
is named by seed and number, `SEED/N`, and gives the same damage again. With `--sweep` the rounds go through every place
of every JSON and header instead, which finds what lies deep in a file. Exits with 1 where anything was found.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import runs

from tools.fuzz.kills import SIGNALS, Fresh, Stable, kill, reference, served
from tools.fuzz.places import each_once, kinds_of_places
from tools.fuzz.rounds import play, prepare
from tools.fuzz.writers import WRITERS

MEMORY_BYTES, FILE_BYTES = 16 << 30, 1 << 30
"""Limits of this process: absurd sizes that are believed show."""


def main() -> None:
    """Parse, prepare, run both kinds of rounds, print."""
    options = parse()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    found = 0
    with tempfile.TemporaryDirectory(prefix="prunecli-") as folder:
        material, work = Path(folder) / "material", Path(folder) / "work"
        material.mkdir()
        work.mkdir()
        stable = warm()  # before anything runs here: a process with threads must not fork
        maker = os.fork()
        if maker == 0:
            prepare(material)
            os._exit(0)
        if os.waitpid(maker, 0)[1] != 0:
            sys.exit("the material could not be made")
        for kind, starter, count in (
            ("", stable, options.kills),
            ("new process", Fresh(), options.fresh_kills),
        ):
            found += kills(kind, starter, count, options, material, work) if count else 0
        if options.rounds or options.minutes:
            found += fuzz(options, material, work)
    sys.exit(1 if found else 0)


def warm() -> Stable:
    """Import what the commands import."""
    import sacrebleu  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch
    from transformers import AutoTokenizer, Trainer  # noqa: F401

    import prunecli.commands.app
    import prunecli.evaluation.evaluate
    import prunecli.modules.loading
    import prunecli.training.finetune  # noqa: F401

    torch.set_num_threads(1)
    return Stable()


def fuzz(options: argparse.Namespace, material: Path, work: Path) -> int:
    """Fuzzing rounds until the time or their number is up; prints the table and what was found."""
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    rounds, statuses, slowest, found = Counter[str](), Counter[tuple[str, int | None]](), 0.0, 0
    swept = each_once(kinds_of_places(material, work), Random(options.seed)) if options.sweep else None
    number = 0
    while (options.rounds is None or number < options.rounds) and (end is None or time.monotonic() < end):
        seed = f"{options.seed}/{number}"
        if swept is None:
            made = play(seed, material, work)
        else:
            place = next(swept)
            made = play(seed, material, work, (place.case,), damage=place.damage)
        rounds[made.kind] += 1
        statuses[made.kind, made.ran.status] += 1
        slowest = max(slowest, made.ran.seconds)
        for fault in made.faults:
            found += 1
            print(
                f"{options.seed}/{number}: prunecli {made.command}: {made.damage}: {fault}\n{made.ran.trace}"
            )
        number += 1
    print(f"\n{'damaged':20} {'rounds':>7} {'done':>7} {'refused':>8} {'bad usage':>9} {'faults':>7}")
    for kind in (*rounds, "all"):
        held = [statuses[key] for key in statuses if kind in (key[0], "all")]
        counts = [
            sum(statuses[key] for key in statuses if kind in (key[0], "all") and key[1] == status)
            for status in (0, 1, 2)
        ]
        row = f"{kind:20} {sum(held):7} {counts[0]:7} {counts[1]:8} {counts[2]:9}"
        print(f"{row} {sum(held) - sum(counts) if kind != 'all' else found:7}")
    print(f"the longest command took {slowest:.1f} s of the processor")
    return found


def kills(
    kind: str, starter: Stable, count: int, options: argparse.Namespace, material: Path, work: Path
) -> int:
    """`count` kill rounds of every writing command; prints the table and what was found."""
    numbers = [number.name for number in SIGNALS]
    head = " ".join(f"{name:>8}" for name in numbers)
    print(f"{kind or 'killed':26} {head} {'too late':>9} {'temporary':>10} {'resumed':>8} {'faults':>7}")
    total = 0
    for writer in WRITERS:
        if options.only and writer.name not in options.only.split(","):
            continue
        with served(writer, material, starter):
            whole = reference(writer, material, work, starter)
            seeds = [f"{options.seed}/{kind}{writer.name}/{number}" for number in range(count)]
            made = [kill(writer, material, work, starter, whole, Random(seed)) for seed in seeds]
        by_signal = " ".join(f"{sum(one.number.name == name for one in made):8}" for name in numbers)
        faults = [fault for one in made for fault in one.faults]
        figures = f"{sum(one.finished for one in made):9} {sum(one.left for one in made):10}"
        print(
            f"{writer.name:26} {by_signal} {figures} {sum(one.kept for one in made):8} {len(faults):7}",
            flush=True,
        )
        for fault in faults:
            print(f"  {fault}")
        total += len(faults)
    return total


def parse() -> argparse.Namespace:
    """The options."""
    parser = runs.parser(__doc__)
    parser.add_argument("--seed", default="1", help="names the rounds (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="fuzzing rounds at most")
    parser.add_argument("--minutes", type=float, help="minutes of fuzzing at most")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="fuzz every place of every file, one after another, instead of any",
    )
    parser.add_argument(
        "--kills", type=int, default=0, help="kills of each writing command, in forked processes"
    )
    parser.add_argument(
        "--fresh-kills", type=int, default=0, help="the same, in new processes: also while importing"
    )
    parser.add_argument("--only", metavar="A,B", help="kill only these commands")
    return parser.parse_args()


if __name__ == "__main__":
    main()
