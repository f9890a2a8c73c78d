"""What scoring heads costs, as ratios.

python benchmarks/score_heads.py MODEL DATA --pairs eng_Latn-deu_Latn --split val --sentences 200
python benchmarks/score_heads.py MODEL --text FILE          (masked and causal language models)

Gradient: time against a plain forward and backward pass of the same batches that asks for activations' gradients
alone; peak memory, each in a process of its own, against a training step (without an optimizer). Ablation: time in
full evaluations; every head needs one where nothing is shared.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import runs
import torch

from prunecli.methods.heads.score import (
    batch_measurements,
    chosen_metric,
    masks_of,
    measure_masked,
    translation_measurements,
)
from prunecli.methods.measuring import gradient_sums
from prunecli.methods.options import EffectMetric
from prunecli.methods.scoring import ScoreOptions
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.find_axes import axes_of
from prunecli.modules.loading import load_model
from prunecli.running.batches import example_losses, task_batches
from prunecli.running.runner import InMemory
from prunecli.text.choice import Dataset, TaskName
from prunecli.text.parallel import ParallelText, parse_pairs, read_parallel
from prunecli.text.plain import read_plain
from prunecli.text.tokens import load_tokenizer


def material(options: argparse.Namespace) -> Dataset:
    if options.text is not None:
        architectures = str(open_model(options.model).config.get("architectures"))
        task: TaskName = "mlm" if "MaskedLM" in architectures else "lm"
        return Dataset(task, read_plain([options.text]).first(options.sentences))
    text = read_parallel(options.data, options.split).first(options.sentences)
    return Dataset("translation", text, parse_pairs(options.pairs, None, text.languages))


class Loaded(NamedTuple):
    """A checkpoint, and what was loaded from it."""

    checkpoint: Checkpoint
    model: Any
    tokenizer: Any


def passes(loaded: Loaded, what: Dataset, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Name -> one pass over all batches."""
    model, axes = loaded.model, axes_of(loaded.checkpoint, "head")
    batches = task_batches(loaded.tokenizer, model, what, options.batch_tokens)

    def plain(parameters: bool) -> None:
        model.requires_grad_(parameters)
        tables = [] if parameters else [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
        hooks = [table.register_forward_hook(lambda _m, _i, made: made.requires_grad_()) for table in tables]
        for batch in batches:
            example_losses(model, batch).sum().backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
        model.requires_grad_(False)
        for hook in hooks:
            hook.remove()

    return {
        "plain": lambda: plain(False),
        "gradient": lambda: gradient_sums(InMemory(model), loaded.checkpoint, axes, batches),
        "training": lambda: plain(True),
    }


def finished(run: Callable[[], Any]) -> None:
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def grown_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Peak memory of `run` above what is held before it; on a CPU as Linux counts resident pages."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) << 10


def gradient(loaded: Loaded, what: Dataset, options: argparse.Namespace) -> None:
    ways = {name: partial(finished, run) for name, run in passes(loaded, what, options).items()}
    turns = runs.in_turns(ways, options.rounds)
    medians = {name: runs.median(own) for name, own in turns.items()}
    both = zip(turns["gradient"], turns["plain"], strict=True)
    ratios = [one.seconds / other.seconds for one, other in both]
    print(
        f"plain forward and backward {medians['plain']:.3f} s, gradient scoring {medians['gradient']:.3f} s: "
    )
    print(f"  {statistics.median(ratios):.3f}x (each round: {', '.join(f'{r:.3f}' for r in ratios)})")
    print(f"  a training step's {medians['training']:.3f} s: {medians['training'] / medians['plain']:.3f}x")


def memory() -> None:
    grown = {}
    for name in ("gradient", "training"):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        grown[name] = int(done.stdout.split()[-1])
        print(f"peak above the loaded model, {name}: {grown[name] / 2**20:,.0f} MiB")
    print(f"  gradient / training: {grown['gradient'] / grown['training']:.2f}x")


def ablation(loaded: Loaded, what: Dataset, options: argparse.Namespace, metric: EffectMetric) -> None:
    masks = masks_of(loaded.checkpoint.layout.attentions, "ablation")
    checkpoint, model, tokenizer = loaded
    decodes = metric in ("chrf++", "bleu")
    if decodes:
        assert isinstance(what.text, ParallelText)
        settings = ScoreOptions(batch_tokens=options.batch_tokens).decoding
        batches = [
            one
            for pair in what.pairs
            for one in translation_measurements(model, tokenizer, what.text, pair, settings)
        ]
    else:
        of_texts = task_batches(tokenizer, model, what, options.batch_tokens)
        batches = batch_measurements(model, of_texts, metric)
    measure = partial(measure_masked, checkpoint, model, batches, decodes=decodes)
    ways = [partial(finished, partial(measure, own)) for own in ([], masks)]
    turns = runs.in_turns(dict(zip(("one", "all"), ways, strict=True)), options.ablation_rounds, warm_up=0)
    for one, every in zip(*turns.values(), strict=True):
        print(f"{metric}: one evaluation {one.seconds:.2f} s, ", end="")
        print(f"without each of {len(masks)} heads {every.seconds:.2f} s")
    ratio = runs.median(turns["all"], turns["one"])
    print(f"  {ratio:.1f} evaluations instead of {len(masks) + 1}: {ratio / (len(masks) + 1):.2f}x")


def parsed() -> argparse.Namespace:
    parser = runs.parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--split", default="val")
    parser.add_argument("--pairs", nargs="+")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ablation-rounds", type=int, default=1)
    parser.add_argument("--metrics", help="of the ablation; default: loss, and chrf++ for translation")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=("gradient", "training"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    torch.set_num_threads(options.threads)
    model = load_model(options.model, device=options.device, dtype=options.dtype)
    loaded = Loaded(open_model(options.model), model, load_tokenizer(options.model))
    what = material(options)
    if options.only is not None:
        run = passes(loaded, what, options)[options.only]
        print(grown_bytes(run, model.device))
        return
    print(f"{options.model.name}, {what.task}, {options.sentences} sentences, {options.threads} threads")
    gradient(loaded, what, options)
    memory()
    model.requires_grad_(False)
    for metric in (options.metrics or ("loss,chrf++" if what.task == "translation" else "loss")).split(","):
        ablation(loaded, what, options, chosen_metric(what.task, metric))


if __name__ == "__main__":
    main()
