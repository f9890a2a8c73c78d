"""Tokens per second of `finetune`'s updates, against a bare PyTorch loop over the same batches, run in turns.

    python benchmarks/finetune.py CHECKPOINT --data DIR --pairs eng_Latn-deu_Latn

The loop is forward, loss, backward, clipping, optimizer and schedule, and nothing else: no progress, no counting, no
look at the loss. Without arguments: the bundled demo model and its text. Seconds of the processor are given beside
those of the clock, which other work on the machine disturbs.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import runs
import torch
from transformers import get_scheduler

from prunecli import demo
from prunecli.modules.loading import load_model
from prunecli.processes import ALONE
from prunecli.running.encoding import translation_examples
from prunecli.running.examples import Examples
from prunecli.text.parallel import languages_of, parse_pairs, read_parallel
from prunecli.text.tokens import load_tokenizer
from prunecli.training.data import BucketSampler, loader
from prunecli.training.loss import Objective
from prunecli.training.options import TrainingOptions
from prunecli.training.trainer import FinetuneTrainer, Watch, training_arguments


def bare(model: Any, examples: Examples, options: TrainingOptions, device: torch.device) -> None:
    """The updates of a run, written out."""
    model.train()
    batches = loader(BucketSampler(examples, options.batch_tokens, options.seed))
    objective = Objective(options.loss)
    optimizer = torch.optim.AdamW(
        model.parameters(), options.learning_rate, options.betas, weight_decay=0.0, fused=True
    )
    schedule = get_scheduler("inverse_sqrt", optimizer, options.warmup)
    for _, batch in zip(range(options.steps or 1), batches, strict=False):
        moved = {name: value.to(device) for name, value in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
            loss = objective(model, moved) / int((batch["labels"] != -100).sum())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()


def ours(model: Any, examples: Examples, options: TrainingOptions) -> None:
    """The same updates by the Trainer."""
    with tempfile.TemporaryDirectory(prefix="prunecli-") as state:
        arguments = training_arguments(options, Path(state), validates=False)
        arguments.max_steps = options.steps or 1
        arguments.save_strategy = "no"
        watch = Watch(ALONE, None, lambda _: None, lambda _: None)
        trainer = FinetuneTrainer(model, arguments, examples, Objective(options.loss), None, options, watch)
        trainer.train()


def main() -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=demo.CHECKPOINT)
    parser.add_argument("--data", type=Path, default=demo.DATA)
    parser.add_argument("--split", default="val")
    parser.add_argument("--pairs", nargs="+")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()

    options = TrainingOptions(
        steps=arguments.steps,
        batch_tokens=arguments.batch_tokens,
        dtype=arguments.dtype,
        device=arguments.device,
        eval_every=1 << 30,
        learning_rate=1e-5,
    )
    pairs = parse_pairs(arguments.pairs, None, languages_of(arguments.data, arguments.split))
    text = read_parallel(arguments.data, arguments.split, tuple({name for pair in pairs for name in pair}))
    made = training_arguments(options, Path(tempfile.gettempdir()), validates=False)
    model = load_model(arguments.checkpoint, device=made.device, dtype="float32")
    examples = translation_examples(load_tokenizer(arguments.checkpoint), model, text, pairs, skip_blank=True)
    sampler = BucketSampler(examples, options.batch_tokens, options.seed)
    if len(sampler) < arguments.steps:
        parser.error(f"the text has {len(sampler)} batches: fewer --steps, or a smaller --batch-tokens")
    rows = [row for _, batch in zip(range(arguments.steps), sampler, strict=False) for row in batch]
    tokens = sum(examples.lengths[row][1] for row in rows)

    bare(model, examples, options.model_copy(update=dict(steps=2)), made.device)  # warm-up
    ways = {
        "bare loop": lambda: bare(model, examples, options, made.device),
        "finetune": lambda: ours(model, examples, options),
    }
    turns = runs.in_turns(ways, arguments.runs, warm_up=0)
    for name, own in turns.items():
        rates = ", ".join(f"{tokens / turn.seconds:.0f}" for turn in own)
        print(f"{name:>10}: {tokens / runs.median(own):8.0f} tokens/s (runs: {rates})")
    both = zip(*turns.values(), strict=True)
    processor = statistics.median(one.processor / other.processor for one, other in both)
    clock = runs.median(turns["bare loop"], turns["finetune"])
    print(f"     ratio: {clock:8.1%} by the clock, {processor:.1%} by the processor")


if __name__ == "__main__":
    main()
