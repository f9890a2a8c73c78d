"""One training run, from open checkpoint and text to weights that are ready to be written; memory is checked first."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.cost import weight_bytes
from prunecli.modules.building import assemble
from prunecli.modules.devices import Devices, place_name
from prunecli.modules.fitting import TEACHER, WEIGHTS, Need, free_for_each
from prunecli.modules.loading import load_model
from prunecli.modules.stock_names import not_run
from prunecli.processes import ProcessGroup
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.running.examples import Examples
from prunecli.tensors.dtypes import is_float, parse_dtype
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.side_files import in_one_line
from prunecli.text.tokens import load_tokenizer
from prunecli.training.data import TrainingData, make_examples, with_filled_batch
from prunecli.training.loss import choose_attention, load_teacher
from prunecli.training.options import TrainingOptions
from prunecli.training.parts import decisive, outputs_of, prepare
from prunecli.training.start import Start
from prunecli.training.state import last_checkpoint, load_weights, prepare_state
from prunecli.training.trainer import FinetuneTrainer, training_arguments
from prunecli.training.watch import Keep, Watch

NO_END = 1 << 40
"""Updates of a run that time alone ends."""


def train(
    start: Start,
    data: TrainingData,
    options: TrainingOptions,
    state: Path,
    *,
    dtype: str | None = None,
    resume: bool = True,
    progress: Progress = silent,
    report: Say = unsaid,
    keep: Keep | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Train. An interrupted run resumes from `state`, to the same result.

    Each of several processes calls this; only the first reports.

    Args:
        state: see `prunecli.training.state`.
        dtype: type of the weights of the result. If None, as `start` stores them.
        resume: go on from what `state` holds; else begin anew.
        report: called with a line at each validation.
        keep: which results are kept in the course of the training.

    Returns:
        The model, its weights those of the result in the first process; figures: steps, tokens per second, losses,
        validations.

    Raises:
        PruneError: model, text, teacher or options that cannot be used; a loss that is not finite.
        KeyboardInterrupt: a signal ended the training; its state is kept.
    """
    arguments = training_arguments(options, state, validates=data.valid is not None)
    process_group = ProcessGroup(arguments.process_index, arguments.world_size)
    if process_group.is_main:
        identity = {
            **start.identity,
            **data.describe(),
            **decisive(options),
            "teacher": None,
            "processes": process_group.world_size,
        }
        inputs = {**start.files(), **data.inputs()}
        if options.teacher is not None:
            with open_model(options.teacher) as teacher:
                identity["teacher"] = teacher.fingerprint
            inputs["teacher"] = {str(options.teacher): teacher.fingerprint}
        if options.teacher_logits is not None:
            identity["teacher_logits"] = True
        prepare_state(state, identity, inputs, resume=resume)
    else:
        report, progress = unsaid, silent
    try:
        if process_group.is_main:
            start.open(state).close()
        process_group.all_gather(None)  # the first has made what the others open
        with start.open(state) as source:
            for name, info in source.tensors.items():
                if not is_float(info.dtype):
                    raise CheckpointError(
                        f"{source.path}: {name} has the type {info.dtype}; only floating-point weights can be "
                        "trained",
                        "Convert the checkpoint to float32, float16 or bfloat16 first.",
                    )
            tokenizer = load_tokenizer(source.path)
            require_room(source, options, arguments.device, process_group, report)

            def build() -> Any:
                model = load_model(source.path, device="cpu", dtype="float32")
                choose_attention(model, arguments.device, options.dtype)
                if source.runs_stock:  # low-rank updates change the names in the model
                    unread.update(dict.fromkeys(not_run(model, source)))
                prepare(model, source, options)
                return model

            unread: dict[str, None] = {}
            model = build()
            if unread:
                report(f"Not run by {type(model).__name__}, written as they are: {in_one_line([*unread])}")
            teach = partial(load_teacher, options, model, tokenizer, data.task, arguments.device)
            examples, objective, validation = make_examples(
                tokenizer, model, source.path, data, options, teach, process_group, report, progress
            )
            batches = options.accumulate * process_group.world_size
            options = with_filled_batch(options, examples, batches, report)
            steps = arguments.max_steps = _steps(examples, options, process_group)
            if options.warmup > steps:
                half = arguments.warmup_steps = steps // 2
                report(f"Warm-up of {half:,} updates, half of the run, instead of {options.warmup:,}.")
            limit = None if options.minutes is None else 60 * options.minutes
            with progress("training", None if steps == NO_END else steps, "steps") as advance:
                watch = Watch(process_group, limit=limit, advance=advance, report=report)
                trainer = FinetuneTrainer(model, arguments, examples, objective, validation, options, watch)
                if keep is not None:
                    keep.whole_model = partial(trainer.whole_model, build)
                    trainer.add_callback(keep)
                if asked_to_shard() and not trainer.is_sharded:
                    report("accelerate shards on GPUs alone: here each process holds the whole model.")
                weights = trainer.run(lambda left: disk_bytes(model, source, options, left, dtype, keep))
            if process_group.is_main:
                model = build() if trainer.is_sharded else model
                load_weights(model, weights)
            process_group.all_gather(None)  # the first removes what the others have read by now
            return model, trainer.figures()
    except (KeyboardInterrupt, SystemExit):  # the latter of a polite kill
        last = last_checkpoint(state)
        if process_group.world_size > 1 and last is not None:
            report(f"Stopped: {last} is kept; the same command goes on from it.")
        raise
    finally:
        if process_group.is_main and last_checkpoint(state) is None:
            shutil.rmtree(state, ignore_errors=True)


def _steps(examples: Examples, options: TrainingOptions, process_group: ProcessGroup) -> int:
    """Updates of the whole run."""
    if options.steps is not None:
        return options.steps
    if options.epochs is None and options.minutes is not None:
        return NO_END
    batches = len(examples.cut(options.batch_tokens)) // process_group.world_size
    return max(1, math.ceil((options.epochs or 1) * math.ceil(batches / options.accumulate)))


COUNTED_STEPS = 1_000_000
"""Updates among which the results that a training keeps are counted."""


def asked_to_shard() -> bool:
    """Whether accelerate's config asks for FSDP or DeepSpeed, which accelerate leaves out on a CPU."""
    return any(parse_flag_from_env(f"ACCELERATE_USE_{way}") for way in ("FSDP", "DEEPSPEED"))


def training_bytes(checkpoint: Checkpoint, options: TrainingOptions, processes: int) -> dict[str, int]:
    """Memory that a training takes on its device, without batches: part -> bytes."""
    weights = weight_bytes(checkpoint, "F32")
    trained = weights
    if options.train != "all" or options.lora is not None:
        model = assemble(checkpoint, torch.device("meta"), torch.float32)
        prepare(model, checkpoint, options)
        trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    parts = {WEIGHTS: weights, "gradients": trained, "Adam's moments": 2 * trained}
    if options.lora is not None:
        parts["low-rank updates"] = trained
    if processes > 1:
        parts["gradients of all"] = trained
    if options.dtype != "float32":
        parts[f"{options.dtype} copies"] = weights // 2  # that autocast keeps for the backward pass
    if options.teacher is not None and options.teacher_logits is None:
        with open_model(options.teacher) as teacher:
            parts[TEACHER] = weight_bytes(teacher, parse_dtype(options.dtype))
    return parts


def disk_bytes(
    model: Any,
    source: Checkpoint,
    options: TrainingOptions,
    steps: range,
    dtype: str | None,
    keep: Keep | None,
) -> int:
    """Bytes that a training holds on the disk at most: its state, and its results.

    Args:
        model: the model, as it is trained.
        source: the checkpoint that training begins with.
        steps: number of updates done, and of all.
        dtype: type of the weights of the result. If None, as `source` stores them.
        keep: which results are kept in its course.
    """
    weights: int = sum(parameter.nbytes for parameter in model.parameters())
    learn: int = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    state = weights + 2 * learn  # with Adam's moments
    saves = -(-steps.stop // options.eval_every)
    result = sum(output.nbytes for output in outputs_of(source, source, dtype))
    kept = 0
    if keep is not None:
        due = sum(keep.is_due(step + 1) for step in steps[:COUNTED_STEPS])
        kept = weights + result * (
            due if options.minutes is None else min(due, 1)
        )  # time may end the run early
    # The Trainer keeps two states, and removes the third once it is written; the result is staged in float32.
    return max(min(saves, 3) * state, min(saves, 2) * state + weights + result) + kept


def require_room(
    checkpoint: Checkpoint,
    options: TrainingOptions,
    device: torch.device,
    process_group: ProcessGroup,
    say: Say = unsaid,
) -> None:
    """Say what it takes, and refuse what does not fit.

    Raises:
        MemoryShortError: with what each part would take.
    """
    processes = process_group.world_size
    whole = parts = training_bytes(checkpoint, options, processes)
    if asked_to_shard() and device.type != "cpu":  # but for the teacher
        parts = {name: size if name == TEACHER else size // processes for name, size in whole.items()}
    free = [free_for_each(device, process_group)]
    needs = [Need(checkpoint, Devices(device), torch.float32, parts, free)]
    if device.type != "cpu":  # where each process reads all weights
        host = torch.device("cpu")
        free = [free_for_each(host, process_group)]
        needs.append(Need(checkpoint, Devices(host), torch.float32, {WEIGHTS: whole[WEIGHTS]}, free))
    for need in needs:
        if not need.fits():
            raise need.refusal(trains=True)
    count, learn = whole[WEIGHTS] // 4, whole["gradients"] // 4
    each = sum(size for name, size in parts.items() if name != TEACHER) / max(count, 1)
    detail = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    say(
        f"Training {learn:,} of {count:,} parameters takes {bytes_text(sum(parts.values()))} on {place_name(device)}, "
        f"{each:.1f} bytes a parameter ({detail}); batches come on top."
    )
