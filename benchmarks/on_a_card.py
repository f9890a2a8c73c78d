"""The main job on a card of a given size: time, peak memory of the card and of the host, command by command.

    python benchmarks/on_a_card.py DIR --card 32GiB

In DIR a checkpoint with the shape of NLLB-200 54.5B is made (101.5 GiB in float16). Its experts are holes in the files,
which are read as zeros from the page cache, so that no disk is measured, and no quality. The text is the demo's.
`collect-gates --memory`, `prune-experts --ratio 0.8`, `evaluate` and `bench-latency` follow. On a larger card each
process is kept to `--card`: torch says that there is no more, and refuses more. The card's memory is what `nvidia-smi`
reports, less what it reports before. Without a GPU the host is measured alone. `--shape small` is a small model, to try
the script.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from prunecli import demo
from prunecli.tensors.quantities import parse_size

SMALLER_CARD = """
import torch

LIMIT = {limit}
_info, _fraction = torch.cuda.mem_get_info, torch.cuda.set_per_process_memory_fraction


def mem_get_info(device=None):
    free, total = _info(device)
    return max(0, free - max(0, total - LIMIT)), min(total, LIMIT)


def set_per_process_memory_fraction(fraction, device=None):
    _fraction(fraction * min(1.0, LIMIT / _info(device)[1]), device)


torch.cuda.mem_get_info = mem_get_info
torch.cuda.set_per_process_memory_fraction = set_per_process_memory_fraction
if torch.cuda.is_available():
    set_per_process_memory_fraction(1.0, 0)
"""
"""sitecustomize.py of the processes: a card of LIMIT bytes."""

SHAPES = {
    "54.5B": "--layers 24 --experts 128 --d-model 2048 --ffn 8192 --vocab 256206",
    "small": "--layers 4 --experts 16 --d-model 64 --ffn 128 --sparse-step 2",
}


class CardMemory(threading.Thread):
    """The largest memory of the card that nvidia-smi reports until `stop`, in MiB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "50"]
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        self.start()

    def run(self) -> None:
        """Read until the process ends."""
        for line in self._process.stdout or ():
            self.peak = max(self.peak, int(line))

    def stop(self) -> int:
        """The peak."""
        self._process.terminate()
        self.join()
        return self.peak


def measured(title: str, command: list[str], environment: dict[str, str], tail: int) -> None:
    """Run `command`; print its last lines and what it took."""
    watch, before = (CardMemory(), 0) if torch.cuda.is_available() else (None, 0)
    if watch:
        time.sleep(0.5)
        before = watch.peak
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        output.seek(0)
        lines = output.read().splitlines()
    print("\n".join(lines[-tail:]))
    card = f"{(watch.stop() - before) / 1024:.2f} GiB of the card, " if watch else ""
    resident = usage.ru_maxrss / 2**20
    print(
        f"== {title}: {seconds:.1f} s, {card}{resident:.2f} GiB resident"
        f"{f', status {os.waitstatus_to_exitcode(status)}' if status else ''}\n",
        flush=True,
    )


def main() -> None:
    """Make the checkpoint, run the commands."""
    options = parse()
    work = options.directory
    work.mkdir(parents=True, exist_ok=True)
    whole, pruned, gates = work / "whole", work / "pruned", work / "gates.json"
    here = Path(__file__).resolve().parent
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as site:
        Path(site, "sitecustomize.py").write_text(SMALLER_CARD.format(limit=parse_size(options.card)))
        environment["PYTHONPATH"] = os.pathsep.join(
            [site, str(here.parent), os.environ.get("PYTHONPATH", "")]
        )
        run = f"{sys.executable} -m prunecli"
        few = f"--data {demo.DATA} --pairs {'-'.join(options.langs.split(',')[:2])} --split test"
        commands = {
            "make": f"{sys.executable} {here}/make_checkpoint.py {whole} --hollow --shard-bytes 5GB "
            + SHAPES[options.shape],
            "inspect": f"{run} inspect {whole} --fit {options.card}",
            "collect": f"{run} collect-gates {whole} --data {demo.DATA} --split train --langs {options.langs} "
            f"--max-sentences {options.sentences} --memory {options.memory} --compute-dtype {options.dtype} "
            f"--batch-tokens {options.batch_tokens} -o {gates} --force",
            "prune": f"{run} prune-experts {whole} --gates {gates} --ratio 0.8 --dtype float16 -o {pruned} --force",
            "evaluate": f"{run} evaluate {pruned} {few} --max-sentences 64 --max-new-tokens 32 "
            f"-o {work}/evaluation.json --force",
            "latency": f"{run} bench-latency {pruned} {few} --beam 5 --batch-size 1,8 --sentences 8 "
            f"--runs 2 -o {work}/latency.json --force",
        }
        for title in options.steps.split(","):
            measured(title, shlex.split(commands[title]), environment, options.tail)
    if options.clean:
        shutil.rmtree(work)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--langs", default="qba_Latn,qbo_Latn,qka_Latn", help="the first two are decoded")
    parser.add_argument("--card", default="32GiB", help="what the card has")
    parser.add_argument("--sentences", type=int, default=2000, help="of each of six pairs, in collect-gates")
    parser.add_argument("--memory", default="24GiB", help="of collect-gates")
    parser.add_argument("--dtype", default="bfloat16", help="that collect-gates computes in")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--shape", choices=SHAPES, default="54.5B")
    parser.add_argument("--steps", default="make,inspect,collect,prune,evaluate,latency")
    parser.add_argument("--tail", type=int, default=12, help="lines of each command that are shown")
    parser.add_argument("--clean", action="store_true", help="delete DIR at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
