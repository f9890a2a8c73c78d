"""One training run, from open checkpoint and text to weights that are ready to be written."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prunecli.errors import CheckpointError, PruneError, UsageError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.modules.loading import load_model
from prunecli.modules.stock_names import not_run
from prunecli.processes import ProcessGroup
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.running.examples import Examples
from prunecli.tensors.dtypes import is_float
from prunecli.tensors.side_files import in_one_line
from prunecli.tensors.transaction import require_space
from prunecli.text.tasks import TrainingTask
from prunecli.text.tokens import Tokenizer, language_id, languages, load_tokenizer
from prunecli.training.batches import BucketSampler, require_batch
from prunecli.training.data import TrainingData, encode_examples, make_validation
from prunecli.training.embedding import Lesson, VectorDistance, lesson
from prunecli.training.keeping import Keep, Keeper
from prunecli.training.loss import FeatureDistance, Objective, measured_loss
from prunecli.training.options import LossOptions, TrainingOptions
from prunecli.training.parts import prepare
from prunecli.training.repeatable import repeatable
from prunecli.training.result import stage
from prunecli.training.room import disk_bytes, require_room
from prunecli.training.state import (
    FINISHED,
    finished,
    last_checkpoint,
    load_weights,
    mark_finished,
    prepare_state,
    require_sound,
    trainer_state,
)
from prunecli.training.teacher import choose_attention, load_teacher, require_positions
from prunecli.training.trainer import FinetuneTrainer, training_arguments
from prunecli.training.watch import Watch

NO_END = 1 << 40
"""Updates of a run that time alone ends."""


@dataclass(frozen=True)
class Trained:
    """A finished training.

    Attributes:
        staged: directory with the trained weights; on the first process only.
        log: figures: steps, tokens per second, losses, validations.
        is_main: whether this process writes the result.
    """

    staged: Path
    log: Mapping[str, Any]
    is_main: bool


def train(
    source: Callable[[], Checkpoint],
    data: TrainingData,
    options: TrainingOptions,
    state: Path,
    *,
    origin: Mapping[str, Any],
    dtype: str | None = None,
    origin_files: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    resume: bool = True,
    progress: Progress = silent,
    report: Say = unsaid,
    keep: Keep | None = None,
) -> Trained:
    """Train, keeping the state in `state`; a run that was interrupted goes on from there, to the same result.

    Every one of several processes calls this; only the first reports.

    Args:
        source: opens the checkpoint, once `state` is there.
        state: see `prunecli.training.state`.
        origin: what `source` opens, as JSON.
        dtype: type of the weights of the result. If None, as `source` stores them.
        origin_files: for its keys that stand for files, their names -> hashes, for messages.
        resume: go on from what `state` holds; else begin anew.
        report: called with a line at each validation.
        keep: told of each update.

    Raises:
        PruneError: model, text, teacher or options that cannot be used; a loss that is not finite.
        KeyboardInterrupt: a signal ended the training; its state is kept.
    """
    arguments = training_arguments(options, state, validates=data.valid is not None)
    process_group = ProcessGroup(arguments.process_index, arguments.world_size)
    if not process_group.is_main:
        report, progress = unsaid, silent
    if process_group.is_main:
        identity = {
            **origin,
            **data.describe(),
            **_identity(options),
            "processes": process_group.world_size,
        }
        inputs = {**origin_files, **data.inputs()}
        if options.teacher is not None:
            inputs["teacher"] = {str(options.teacher): identity["teacher"]}
        prepare_state(state, identity, inputs, resume=resume)
    try:
        if process_group.is_main:
            source().close()
        process_group.all_gather(None)  # the first has made what the others open
        with source() as checkpoint:
            checkpoint.require_trainable()
            for name, info in checkpoint.tensors.items():
                if not is_float(info.dtype):
                    raise CheckpointError(
                        f"{checkpoint.path}: {name} has the type {info.dtype}; only floating-point weights can be "
                        "trained",
                        "Convert the checkpoint to float32, float16 or bfloat16 first.",
                    )
            tokenizer = load_tokenizer(checkpoint.path)
            for language in {name for pair in data.pairs for name in pair} if languages(tokenizer) else ():
                language_id(tokenizer, language)
            done = finished(state)
            if done is not None and done["target"] != _target(options):
                done = None
            if done is None:
                require_room(checkpoint, options, arguments.device, process_group, report)
            model = load_model(checkpoint.path, device="cpu", dtype="float32")
            choose_attention(model, arguments.device, options.dtype)
            if checkpoint.runs_stock and (kept := not_run(model, checkpoint)):
                report(f"Not run by {type(model).__name__}, written as they are: {in_one_line(kept)}")
            prepare(model, checkpoint, options)
            _require_tokens(tokenizer, model, checkpoint)
            if done is None:
                done = _train(
                    model,
                    tokenizer,
                    checkpoint,
                    data,
                    options,
                    arguments,
                    process_group,
                    state,
                    progress,
                    report,
                    keep,
                    dtype,
                )
            else:
                report("The training had ended before; writing its result.")
                load_weights(model, Path(done["weights"]))
            process_group.all_gather(None)  # the first removes what the others have read by now
            staged = state / "result"
            if process_group.is_main:
                stage(model, checkpoint, staged)
        log = {key: done[key] for key in done if key not in ("format", "weights", "target")}
        return Trained(staged, log, process_group.is_main)
    except (KeyboardInterrupt, SystemExit):  # the latter of a polite kill
        last = last_checkpoint(state)
        if process_group.world_size > 1 and last is not None:
            report(f"Stopped: {last} is kept; the same command goes on from it.")
        raise
    finally:
        if process_group.is_main and last_checkpoint(state) is None and finished(state) is None:
            shutil.rmtree(state, ignore_errors=True)


def _train(
    model: Any,
    tokenizer: Tokenizer,
    source: Checkpoint,
    data: TrainingData,
    options: TrainingOptions,
    arguments: Any,
    process_group: ProcessGroup,
    state: Path,
    progress: Progress,
    report: Say,
    keep: Keep | None,
    dtype: str | None,
) -> dict[str, Any]:
    """Train to the end; the model then has the weights of the result."""
    teacher = learned = None
    if options.teacher is not None:
        teacher = load_teacher(options, model, tokenizer, data.task, arguments.device)
        if data.task == "embedding":
            learned = lesson(source.path, model, tokenizer, options.teacher, teacher, report)
    examples = encode_examples(
        tokenizer,
        model,
        data,
        data.train,
        seed=options.seed,
        context=options.context,
        lesson=learned,
        progress=progress,
    )
    require_batch(examples, options.batch_tokens, options.accumulate * process_group.world_size)
    if options.teacher is not None:
        require_positions(options.teacher, teacher, examples)
    objective = _objective(data.task, options.loss, teacher, learned)
    validation = None
    if data.valid is not None:
        measured = _objective(data.task, measured_loss(options.loss, data.task), teacher, learned)
        validation = make_validation(tokenizer, model, data, options, measured, learned)
    steps = arguments.max_steps = _steps(examples, options, process_group)
    if options.warmup > steps:
        arguments.warmup_steps = steps // 2
        report(f"Warm-up of {steps // 2:,} updates, half of the run, instead of {options.warmup:,}.")
    last, step = last_checkpoint(state), 0
    arguments.eval_on_start = validation is not None and last is None
    limit = None if options.minutes is None else 60 * options.minutes
    total = None if steps == NO_END else steps
    with progress("training", total, "steps") as advance:
        watch = Watch(process_group, limit=limit, advance=advance, report=report)
        keepers = () if keep is None else (Keeper(keep, model, source, process_group),)
        trainer = FinetuneTrainer(model, arguments, examples, objective, validation, options, watch, keepers)
        if last is not None:
            require_sound(last)
            kept = trainer_state(last)
            step = kept["global_step"]
            report(f"Going on from step {step:,} in {state}.")
            trainer.restore(kept)
        if process_group.is_main:
            (state / FINISHED).unlink(missing_ok=True)  # of a run to another end
            needed = disk_bytes(model, source, options, range(step, steps), dtype, keep)
            stored = sum(path.stat().st_size for path in state.glob("checkpoint-*/*"))
            require_space(state, needed - stored)
        if last is not None and step >= steps:
            trainer.adopt(last)
        else:
            order = repeatable(arguments.device, trainer.probe, process_group, report)
            with watch.signals(), _alone_noticed(process_group), order:
                trainer.train(resume_from_checkpoint=None if last is None else str(last))
    if watch.interrupted:
        step = trainer.state.global_step
        report(f"Stopped after step {step:,}: {state} is kept; the same command goes on from it.")
        raise KeyboardInterrupt
    best, step = trainer.state.best_model_checkpoint, trainer.state.global_step
    weights = Path(best) if validation is not None and best else state / f"checkpoint-{step}"
    done = {**trainer.figures(), "weights": str(weights), "target": _target(options)}
    if process_group.is_main:
        mark_finished(state, done)
    return done


def _objective(task: TrainingTask, options: LossOptions, teacher: Any, learned: Lesson | None) -> Objective:
    if learned is not None:
        return VectorDistance(options, learned)
    return (FeatureDistance if task == "feature-extraction" else Objective)(options, teacher)


@contextmanager
def _alone_noticed(process_group: ProcessGroup) -> Iterator[None]:
    """Says plainly that another process has ended, which torch notices when gradients are summed."""
    try:
        yield
    except RuntimeError as error:
        if process_group.world_size > 1 and any(word in str(error) for word in ("onnection", "gloo", "NCCL")):
            raise PruneError(
                f"process {process_group.rank} of {process_group.world_size} stops: another one has ended",
                "Mend what that one says; the same command goes on from the last validation.",
            ) from error
        raise


def _steps(examples: Examples, options: TrainingOptions, process_group: ProcessGroup) -> int:
    """Updates of the whole run."""
    if options.steps is not None:
        return options.steps
    if options.epochs is None and options.minutes is not None:
        return NO_END
    sampler = BucketSampler(
        examples.lengths, options.batch_tokens, options.seed, process_group.rank, process_group.world_size
    )
    return max(1, math.ceil((options.epochs or 1) * math.ceil(len(sampler) / options.accumulate)))


def _require_tokens(tokenizer: Tokenizer, model: Any, checkpoint: Checkpoint) -> None:
    highest = max(tokenizer.get_vocab().values(), default=0)
    size = model.config.get_text_config().vocab_size
    if highest >= size:
        raise UsageError(
            f"{checkpoint.path}: the tokenizer has ids up to {highest:,}, the model {size:,} tokens",
            "Tokenizer and model are not of one checkpoint; copy both again.",
        )


def _identity(options: TrainingOptions) -> dict[str, Any]:
    """The options that the weights after a given number of updates depend on."""
    apart = (
        *("loss", "steps", "epochs", "minutes", "patience", "device", "teacher"),
        "gradient_checkpointing",
        *(("train",) if options.train == "all" else ()),  # prunecli 0.1.0 knew no other
    )
    values = {key: value for key, value in options.values_of(TrainingOptions).items() if key not in apart}
    teacher = None
    if options.teacher is not None:
        with open_model(options.teacher) as opened:
            teacher = opened.fingerprint
    return {**values, **asdict(options.loss), "teacher": teacher}


def _target(options: TrainingOptions) -> list[Any]:
    """What decides when a run ends; a run that ended for one target goes on for another."""
    return [options.steps, options.epochs, options.minutes, options.patience]
