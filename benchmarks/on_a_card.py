"""The main job on a card of a given size: time, peak memory of the card and of the host, command by command.

    python benchmarks/on_a_card.py DIR --card 32GiB
    python benchmarks/on_a_card.py DIR --shape qwen3-30B --text FILE --ratio 0.5 --steps make,collect,prune,perplexity
    python benchmarks/on_a_card.py DIR --shape llama-8B --text FILE --ratio 0.25 --steps make,narrow,perplexity,finetune

In DIR a checkpoint with the shape of NLLB-200 54.5B is made (101.5 GiB in float16), of Qwen3-30B-A3B (56.9 GiB in
bfloat16) or of Llama-3.1-8B (15.0 GiB). Experts are holes in the files, which are read as zeros from the page cache, so
that no disk is measured, and no quality. The text is the demo's. On a larger card each process is kept to `--card`:
torch says that there is no more, and refuses more. The card's memory is what `nvidia-smi` reports, less what it reports
before. Without a GPU the host is measured alone. `--shape small` and `small-qwen3` are small models, to try the script.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import runs
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


def changes(**values: int) -> str:
    """Return the options of make_checkpoint.py that set keys of config.json."""
    return " ".join(f"--set {key}={value}" for key, value in values.items())


SHAPES = {
    "54.5B": "--layers 24 --experts 128 --d-model 2048 --ffn 8192 --vocab 256206",
    "small": "--layers 4 --experts 16 --d-model 64 --ffn 128 --sparse-step 2",
    "qwen3-30B": "--family qwen3_moe --dtype bfloat16 "
    + changes(
        num_hidden_layers=48,
        num_local_experts=128,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
    ),
    "small-qwen3": "--family qwen3_moe --dtype bfloat16 "
    + changes(
        num_hidden_layers=2,
        num_local_experts=8,
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts_per_tok=2,
    ),
    "small-llama": "--family llama --dtype bfloat16 "
    + changes(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "llama-8B": "--family llama --dtype bfloat16 "
    + changes(hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, vocab_size=128256),
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


def measured(title: str, command: str, environment: dict[str, str], tail: int) -> None:
    """Run `command`; print its last lines and what it took."""
    watch, before = (CardMemory(), 0) if torch.cuda.is_available() else (None, 0)
    if watch:
        time.sleep(0.5)
        before = watch.peak
    ran = runs.run(["sh", "-c", f"exec {command} >&2"], environment, check=False)
    print("\n".join(ran.said.splitlines()[-tail:]))
    card = f"{(watch.stop() - before) / 1024:.2f} GiB of the card, " if watch else ""
    status = f", status {ran.status}" if ran.status else ""
    print(f"== {title}: {ran.seconds:.1f} s, {card}{ran.peak / 2**30:.2f} GiB resident{status}\n", flush=True)


def main() -> None:
    """Make the checkpoint, run the commands."""
    options = parse()
    work = options.directory
    work.mkdir(parents=True, exist_ok=True)
    whole, pruned, gates = work / "whole", work / "pruned", work / "gates.json"
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as site:
        Path(site, "sitecustomize.py").write_text(SMALLER_CARD.format(limit=parse_size(options.card)))
        path = os.pathsep.join([site, str(here.parent), os.environ.get("PYTHONPATH", "")])
        run = f"{sys.executable} -m prunecli"
        few = f"--data {demo.DATA} --pairs {'-'.join(options.langs.split(',')[:2])} --split test"
        text = f"--text {options.text}"
        counted = (
            f"{text} --memory {options.memory}"
            if "--family" in SHAPES[options.shape]
            else f"--data {demo.DATA} --split train --langs {options.langs} --max-sentences {options.sentences} "
            f"--memory {options.memory} --compute-dtype {options.dtype}"
        )
        commands = {
            "make": f"{sys.executable} {here}/make_checkpoint.py {whole} --hollow --shard-bytes 5GB "
            + SHAPES[options.shape],
            "inspect": f"{run} inspect {whole} --fit {options.card}",
            "collect": f"{run} collect-gates {whole} {counted} --batch-tokens {options.batch_tokens} "
            f"-o {gates} --force",
            "prune": f"{run} prune-experts {whole} --gates {gates} --ratio {options.ratio} "
            f"--metric {'frequency' if options.text else 'importance'} -o {pruned} --force",
            "evaluate": f"{run} evaluate {pruned} {few} --max-sentences 64 --max-new-tokens 32 "
            f"-o {work}/evaluation.json --force",
            "perplexity": f"{run} evaluate {whole} {pruned} {text} --memory {options.memory} "
            f"-o {work}/perplexity.json --force",
            "latency": f"{run} bench-latency {pruned} {few} --beam 5 --batch-size 1,8 --sentences 8 "
            f"--runs 2 -o {work}/latency.json --force",
            "narrow": f"{run} prune-ffn {whole} {text} --memory {options.memory} --ratio {options.ratio} "
            f"-o {pruned} --force",
            "heads": f"{run} score-heads {whole} {text} --memory {options.memory} -o {work}/heads.json --force",
            "shrink": f"{run} shrink {whole} --text {options.text} --params 75% --memory {options.memory} "
            f"--only layers,units --trials 2 -o {work}/shrunk --force",
            "finetune": f"{run} finetune {pruned} --text {options.text} --lora 16 --steps 20 -o {work}/tuned --force",
        }
        for title in options.steps.split(","):
            measured(title, commands[title], {"PYTHONPATH": path}, options.tail)
    if options.clean:
        shutil.rmtree(work)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = runs.parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--langs", default="qba_Latn,qbo_Latn,qka_Latn", help="the first two are decoded")
    parser.add_argument("--card", default="32GiB", help="what the card has")
    parser.add_argument("--sentences", type=int, default=2000, help="of each of six pairs, in collect-gates")
    parser.add_argument("--text", type=Path, help="a file of plain text, for language models")
    parser.add_argument("--ratio", type=float, default=0.8, help="of the experts, or of the hidden units")
    parser.add_argument("--memory", default="24GiB", help="of commands that run layer by layer")
    parser.add_argument("--dtype", default="bfloat16", help="that collect-gates computes in")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--shape", choices=SHAPES, default="54.5B")
    parser.add_argument("--steps", default="make,inspect,collect,prune,evaluate,latency")
    parser.add_argument("--tail", type=int, default=12, help="lines of each command that are shown")
    parser.add_argument("--clean", action="store_true", help="delete DIR at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
