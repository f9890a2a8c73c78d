"""`prunecli finetune`: train a checkpoint further, with or without a teacher, or a new model from a config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import prunecli
from prunecli import processes
from prunecli.commands import console
from prunecli.commands.checkpoints import (
    TASK,
    checkpoint_directory,
    checkpoint_or_demo,
    with_demo_text,
)
from prunecli.commands.command import command
from prunecli.commands.rewriting import WritingOptions, opened_by, output_option
from prunecli.options import (
    Counts,
    StoredDtype,
    compute_option,
    hidden_option,
    option,
    training_option,
    validation_option,
)
from prunecli.tensors.quantities import counted
from prunecli.text.choice import HEADLESS, TextChoice, TrainingTask, split_option
from prunecli.training.options import SCRATCH_RATE, SCRATCH_WARMUP, LossOptions, TrainingOptions

if TYPE_CHECKING:
    from prunecli.model.stock import StockSupport
    from prunecli.results.rewriting import Training

DEMO_STEPS = 100
STEPS = 1000

SHOWN = 9
"""Validations in the table, apart from the first."""


class Finetune(WritingOptions, TextChoice, TrainingOptions):
    """Options of the command."""

    LEFT_OUT = ("source_file", "target_file")

    output: Path = output_option("finetuned")
    task: TrainingTask | None = TASK
    from_scratch: Path | None = training_option(
        "Train random weights: a config.json, or a directory with it and a tokenizer.",
        metavar="CONFIG",
        role="input",
        excludes="checkpoint",
    )
    tokenizer: Path | None = training_option(
        "With --from-scratch: the tokenizer. Default: that beside CONFIG.",
        metavar="DIR",
        role="input",
        hidden=True,
        needs="from_scratch",
    )
    steps: int | None = option(
        "Number of updates. Default: 1000 (of the demo's text 100), or --minutes.", ge=1, excludes="epochs"
    )
    distill: float | None = training_option(
        "Weight of the teacher's distribution; the cross-entropy has 1 - W. Default with --teacher: 0.5.",
        metavar="W",
        needs="teacher",
        ge=0,
        le=1,
    )
    temperature: float | None = training_option(
        "Temperature of both distributions. Default: 1.", metavar="T", hidden=True, gt=0, needs="teacher"
    )
    hidden_weight: float = training_option(
        "Weight of the distance to the teacher's last hidden states.", 0.0, ge=0, hidden=True, needs="teacher"
    )
    label_smoothing: float | None = training_option(
        "Label smoothing of the cross-entropy. Default: 0.1.", metavar="S", hidden=True, ge=0, le=1
    )
    split: str = split_option("Split of --data to train on.", "train")
    valid_split: str | None = validation_option(
        "Split to validate with. Default: val, if it exists.", excludes="files labelled source_file"
    )
    valid_text: tuple[Path, ...] = validation_option("Plain text to validate with.", (), role="text")
    valid_labelled: Path | None = validation_option(
        "Labelled text to validate with.", role="text", hidden=True
    )
    max_valid: int | None = validation_option("Validate with the first N lines.", ge=1, hidden=True)
    stored_dtype: StoredDtype | None = compute_option(
        "Stored type: float16, bfloat16, float32. Default: as in the checkpoint.",
        flag="--dtype",
        metavar="TYPE",
    )
    resume: Literal["auto", "never"] = hidden_option(
        "auto: resume the same command if it was interrupted; never.",
        "auto",
    )
    keep_state: bool = hidden_option(
        "Keep OUTPUT.training, from which --steps can continue.",
        False,
    )
    save_every: int | None = hidden_option(
        "Also write the model after each N updates, as OUTPUT.steps/step-N.",
        beside=".steps",
        ge=1,
    )
    keep_at: Counts = hidden_option(
        "Also write the model after these updates.",
        (),
        metavar="N,M",
        beside=".steps",
    )

    def with_defaults(self) -> Finetune:
        """Return the options with the values that stand for None."""
        is_new = self.from_scratch is not None
        distill = 0.5 if self.teacher else 0.0
        loss = LossOptions(
            0.1 if self.label_smoothing is None else self.label_smoothing,
            distill if self.distill is None else self.distill,
            1.0 if self.temperature is None else self.temperature,
            self.hidden_weight,
        )
        values: dict[str, Any] = {"loss": loss}
        scratch = {"learning_rate": SCRATCH_RATE, "warmup": SCRATCH_WARMUP}
        values |= {
            name: value for name, value in scratch.items() if is_new and name not in self.model_fields_set
        }
        if self.steps is self.epochs is self.minutes is None:
            is_demo = self.data is None and not self.files and self.labelled is None
            values["steps"] = DEMO_STEPS if is_demo else STEPS
        return self.updated(**values)


@command
def finetune(options: Finetune) -> None:
    """Train a reduced checkpoint further, so that it recovers its quality; or a new model from a config.

    The loss is label-smoothed cross-entropy, mixed with the teacher's distribution if there is one. Removed parts stay
    removed, shared parts stay shared. The best model by --measure is written; figures go to OUTPUT.finetune.json.
    torchrun -m prunecli finetune … trains in several processes.
    """
    from prunecli.tensors.hub.names import local_path

    if options.stored_dtype is not None and "dtype" not in options.model_fields_set:
        console.note("--dtype is the type of the stored weights; --compute-dtype is the type to compute in.")
    options = options.with_defaults()
    named = options.tokenizer or options.from_scratch or options.checkpoint
    choice = with_demo_text(options, named)
    valid = TextChoice(
        split=options.valid_split,
        files=options.valid_text,
        whole_files=options.whole_files,
        labelled=options.valid_labelled,
        max_sentences=options.max_valid,
    )
    start = prunecli.Start(options.checkpoint, options.from_scratch, options.tokenizer, options.seed)
    destination = prunecli.Destination(
        options.output,
        options.stored_dtype,
        options.force,
        options.keep_state,
        options.save_every,
        options.keep_at,
    )
    destination.check(local_path(start.checkpoint))  # before anything is fetched
    if start.config is None:
        start = replace(start, checkpoint=checkpoint_or_demo(start.checkpoint))
    destination.check(start.checkpoint)
    if options.teacher is not None:
        options = options.updated(teacher=checkpoint_directory(options.teacher))
    task = options.task or start.task(console.note)
    if task in HEADLESS:
        why = f"goes with models that have a head, not with `task={task}`"
        options.refuse(("label_smoothing", "distill", "temperature"), why)
    result = prunecli.finetune(
        start,
        choice,
        destination,
        options,
        valid=valid,
        task=task,
        resume=options.resume == "auto",
        dry_run=options.dry_run,
        **console.listeners(),
    )
    if result is not None:
        training, support = result
        console.result(training.to_json, _blocks(training, support, destination), as_json=options.as_json)
    processes.leave()


def _blocks(training: Training, support: StockSupport, destination: prunecli.Destination) -> console.Blocks:
    from prunecli.evaluation.tasks import perplexity

    steps = training.validation
    columns = {
        "step": "{step:,}",
        "loss": "{loss:.4f}",
        "perplexity": "{perplexity:,.2f}",
        "chrF++": "{chrf:.2f}",
        "cosine": "{cosine:.4f}",
    }
    if training.arguments["task"] != "lm":
        del columns["perplexity"]
    rows = [{**vars(step), "perplexity": perplexity(step.loss)} for step in (*steps[:1], *steps[1:][-SHOWN:])]
    yield console.table("Validation", rows, columns)
    best = training.best
    chosen = f"; the best, of step {best['step']:,}, is the result" if best else ""
    speed = f"{training.tokens:,} tokens, {training.tokens_per_second:,.0f} a second"
    yield f"{counted(training.steps, 'update')}, {speed}{chosen}"
    yield support.line
    yield f"Written: {destination.output} ({opened_by(support)}), figures in {destination.figures}"
