"""What `finetune` does once its options are read: name what is taken by default, train, print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from prunecli import demo, processes
from prunecli.commands import console
from prunecli.commands.checkpoints import checkpoint_directory, checkpoint_or_demo
from prunecli.commands.rewriting import opened_by
from prunecli.errors import UsageError
from prunecli.progress import unsaid
from prunecli.tensors.hub.names import local_path
from prunecli.text.tasks import HEADLESS
from prunecli.training.finetune import Destination, finetune

MOST_NATS = 700.0
"""A loss whose exponential a float still holds."""

SHOWN = 9
"""Validations in the table beside the first."""

if TYPE_CHECKING:
    from prunecli.model.stock import StockSupport
    from prunecli.results.rewriting import Training
    from prunecli.text.choice import TextChoice
    from prunecli.text.tasks import TrainingTask
    from prunecli.training.options import TrainingOptions
    from prunecli.training.start import Start


def run(
    start: Start,
    choice: TextChoice,
    valid: TextChoice,
    destination: Destination,
    options: TrainingOptions,
    *,
    task: TrainingTask | None,
    of_logits: Sequence[str],
    resume: bool,
    quiet: bool,
    json: bool,
) -> None:
    """Train, and say what came of it.

    Args:
        of_logits: options that were given which are of a loss of logits alone.

    Raises:
        PruneError: as `finetune`.
    """
    destination.check(local_path(start.checkpoint))  # before anything is fetched
    if start.config is None:
        path = demo.CHECKPOINT if quiet and start.checkpoint is None else checkpoint_or_demo(start.checkpoint)
        start = replace(start, checkpoint=path)
    destination.check(start.checkpoint)
    if options.teacher is not None:
        options = replace(options, teacher=checkpoint_directory(options.teacher))
    task = task or start.task(console.note)
    if task in HEADLESS and of_logits:
        goes, them = ("goes", "it") if len(of_logits) == 1 else ("go", "them")
        raise UsageError(
            f"{' and '.join(of_logits)} {goes} with models that have a head, not with --task {task}",
            f"Leave {them} out.",
        )
    result = finetune(
        start,
        choice,
        destination,
        options,
        valid=valid,
        task=task,
        resume=resume,
        progress=console.progress(quiet or json),
        say=unsaid if quiet else console.note,
        warn=console.note,
    )
    if result is not None:
        if json:
            console.print_json(result[0].to_json())
        elif not quiet:
            _show(*result, destination)
    processes.leave()


def _show(training: Training, support: StockSupport, destination: Destination) -> None:
    steps = training.validation
    columns: dict[str, list[str]] = {
        "step": [f"{step.step:,}" for step in steps],
        "loss": [f"{step.loss:.4f}" for step in steps],
        "perplexity": [],
        "chrF++": [f"{step.chrf:.2f}" for step in steps if step.chrf is not None],
        "cosine": [f"{step.cosine:.4f}" for step in steps if step.cosine is not None],
    }
    if training.arguments["task"] == "lm":
        columns["perplexity"] = [f"{math.exp(min(step.loss, MOST_NATS)):,.2f}" for step in steps]
    shown = {name: column[:1] + column[1:][-SHOWN:] for name, column in columns.items() if column}
    if shown:
        rows = [list(row) for row in zip(*shown.values(), strict=True)]
        console.show(console.table("Validation", tuple(shown), rows))
    best = training.best
    chosen = f"; the best, of step {best['step']:,}, is the result" if best else ""
    speed = f"{training.tokens:,} tokens, {training.tokens_per_second:,.0f} a second"
    console.out(f"{training.steps:,} updates, {speed}{chosen}")
    console.out(support.line)
    console.out(f"Written: {destination.output} ({opened_by(support)}), figures in {destination.figures}")
