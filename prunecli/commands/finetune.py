"""`prunecli finetune`: train a checkpoint further, with or without a teacher, or a new model from a config."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from prunecli import processes
from prunecli.commands.finetune_options import (
    CheckpointingOption,
    DropoutOption,
    DtypeOutOption,
    KeepAtOption,
    LoraOption,
    SaveEveryOption,
    TrainingDtypeOption,
    TrainOption,
    chosen_dtype,
    step_numbers,
)
from prunecli.commands.groups import Helps, Without, flattened
from prunecli.commands.options import (
    CheckpointArgument,
    ForceOption,
    JsonOption,
    QuietOption,
    SeedOption,
    TrainingTaskOption,
    refuse_absent,
    refuse_absent_text,
)
from prunecli.commands.text_options import TextOptions
from prunecli.errors import UsageError
from prunecli.tensors.hub.names import checkpoint_path

DEMO_STEPS = 100
STEPS = 1000


@flattened
def finetune(
    checkpoint: CheckpointArgument = None,
    from_scratch: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="Train random weights instead: a config.json of a known family, or a directory with one and a "
            "tokenizer.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --from-scratch: the tokenizer; default: that beside CONFIG.",
        ),
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(
            metavar="CHECKPOINT",
            parser=checkpoint_path,
            callback=refuse_absent,
            help="Checkpoint to learn from, with the same vocabulary: the one that was reduced, say.",
        ),
    ] = None,
    texts: Annotated[
        TextOptions,
        Without({"source_file", "target_file"}),
        Helps(
            split="Split that is trained on.",
            batch_tokens="Padded tokens of a batch's longer side; less takes less memory.",
            max_sentences="Train on the first N lines.",
            device="auto (a GPU where there is one), cpu, cuda: one for each process.",
        ),
    ] = TextOptions(split="train"),
    valid_split: Annotated[
        str | None,
        typer.Option(help="Split to validate with. Default: val, where there is one."),
    ] = None,
    valid_text: Annotated[
        list[Path] | None,
        typer.Option(callback=refuse_absent_text, metavar="FILE", help="Plain text to validate with."),
    ] = None,
    valid_labelled: Annotated[
        Path | None,
        typer.Option(
            callback=refuse_absent_text,
            metavar="FILE",
            help="Labelled text to validate with.",
        ),
    ] = None,
    task: TrainingTaskOption = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Updates. Default: {STEPS}, or until --minutes are over.",
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(metavar="E", help="Passes over the text instead."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(metavar="M", help="Stop after so long, validations included."),
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches of one update.")] = 1,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            help="The highest, after the warm-up; then it falls with the inverse square root of the updates. "
            "Default: 1e-4; 7e-4 from scratch.",
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Updates in which it rises. Default: 200; 4000 from scratch.",
        ),
    ] = None,
    label_smoothing: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="S",
            help="Of the cross-entropy. Default: 0.1.",
        ),
    ] = None,
    distill: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="W",
            help="Weight of the teacher's distribution; 1 - W is the cross-entropy's. Default with --teacher: 0.5.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", help="Of both distributions. Default: 1."),
    ] = None,
    hidden_weight: Annotated[
        float,
        typer.Option(min=0.0, help="Weight of the distance to its last hidden states."),
    ] = 0.0,
    clip_norm: Annotated[float, typer.Option(min=0.0, help="Longest gradient of an update; 0: any.")] = 1.0,
    dtype: TrainingDtypeOption = "auto",
    dropout: DropoutOption = None,
    train: TrainOption = "all",
    lora: LoraOption = None,
    gradient_checkpointing: CheckpointingOption = False,
    eval_every: Annotated[
        int,
        typer.Option(min=1, help="Updates between validations; the state is kept too."),
    ] = 500,
    metric: Annotated[
        Literal["loss", "chrf++"], typer.Option(help="By which the best model is chosen.")
    ] = "loss",
    beam: Annotated[int, typer.Option(min=1, help="Beams of the translations for chrf++.")] = 1,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Stop after N validations without a better one.",
        ),
    ] = None,
    max_valid: Annotated[
        int | None,
        typer.Option(min=1, help="Validate with the first N lines."),
    ] = None,
    seed: SeedOption = 0,
    dtype_out: DtypeOutOption = None,
    resume: Annotated[
        Literal["auto", "never"],
        typer.Option(help="auto: go on where the same command was interrupted."),
    ] = "auto",
    keep_state: Annotated[
        bool, typer.Option("--keep-state", help="Keep OUTPUT.training, from which --steps can go further.")
    ] = False,
    save_every: SaveEveryOption = None,
    keep_at: KeepAtOption = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The trained checkpoint.")
    ] = Path("finetuned"),
    force: ForceOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Train a reduced checkpoint further, so that it recovers its quality; or a new model from a config.

    Label-smoothed cross-entropy, mixed with the teacher's distribution where one is given; Adam (0.9, 0.98) with
    warm-up and inverse square root. What was removed stays removed, what is shared stays shared. The best model by
    --metric is written; figures go to OUTPUT.finetune.json.

    Several processes: torchrun --standalone --nproc-per-node 2 -m prunecli finetune …; batches are per process.
    """
    from prunecli.text.choice import TextChoice
    from prunecli.training import options as training

    choice = texts.choice(tokenizer or from_scratch or checkpoint)
    valid = TextChoice(
        split=valid_split,
        files=tuple(valid_text or ()),
        whole_files=texts.whole_files,
        labelled=valid_labelled,
        max_sentences=max_valid,
    )
    if steps is not None and epochs is not None:
        raise UsageError("--steps and --epochs were both given", "Give one of them.")
    positive = {
        "--learning-rate": learning_rate,
        "--temperature": temperature,
        "--epochs": epochs,
        "--minutes": minutes,
    }
    for option, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{option} {value:g}: not a finite number above 0")
    if teacher is None and (distill or hidden_weight or temperature is not None):
        raise UsageError(
            "--distill, --temperature and --hidden-weight need a teacher", "Name one with --teacher DIR."
        )
    if lora is not None and train not in ("all", "experts"):
        raise UsageError(f"--lora and --train {train} were both given", "Give one of them.")
    if from_scratch is None and tokenizer is not None:
        raise UsageError("--tokenizer goes with --from-scratch", "A checkpoint has its own.")
    if from_scratch is not None and checkpoint is not None:
        raise UsageError("a checkpoint and --from-scratch were both given", "Give one of them.")

    is_new = from_scratch is not None
    rate, rise = (
        (training.SCRATCH_RATE, training.SCRATCH_WARMUP)
        if is_new
        else (training.FINETUNE_RATE, training.FINETUNE_WARMUP)
    )
    no_end = steps is None and epochs is None and minutes is None
    asked = {"--label-smoothing": label_smoothing, "--distill": distill, "--temperature": temperature}
    options = training.TrainingOptions(
        loss=training.LossOptions(
            0.1 if label_smoothing is None else label_smoothing,
            (0.5 if teacher else 0.0) if distill is None else distill,
            1.0 if temperature is None else temperature,
            hidden_weight,
        ),
        steps=(DEMO_STEPS if texts.data is None and not texts.text and texts.labelled is None else STEPS)
        if no_end
        else steps,
        epochs=epochs,
        minutes=minutes,
        batch_tokens=texts.batch_tokens,
        accumulate=accumulate,
        learning_rate=rate if learning_rate is None else learning_rate,
        warmup=rise if warmup is None else warmup,
        clip_norm=clip_norm,
        dtype=chosen_dtype(dtype, texts.device),
        device=texts.device,
        eval_every=eval_every,
        metric=metric,
        patience=patience,
        beam=beam,
        teacher=teacher,
        context=texts.context,
        dropout=dropout,
        train=train,
        lora=lora,
        gradient_checkpointing=gradient_checkpointing,
        seed=seed,
    )
    from prunecli.commands.finetune_run import run
    from prunecli.training.finetune import Destination
    from prunecli.training.start import Start

    run(
        Start(checkpoint, from_scratch, tokenizer, seed),
        choice,
        valid,
        Destination(output, dtype_out, force, keep_state, save_every, step_numbers(keep_at)),
        options,
        task=task,
        of_logits=[name for name, value in asked.items() if value is not None],
        resume=resume == "auto",
        quiet=quiet or processes.rank() != 0,
        json=json,
    )
