"""finetune: from a choice of text to a checkpoint and its figures; one training run, whose memory is checked first."""

import math
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from pydantic.dataclasses import dataclass
from safetensors.torch import load_file

from prunecli import processes
from prunecli.errors import CheckpointError, DataError, OutputError, UsageError, damaged
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.conversion import PEFT, require_package
from prunecli.model.cost import weight_bytes
from prunecli.model.history import given, history_step, named
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.model.stock import StockSupport, stock_support
from prunecli.modules.building import assemble
from prunecli.modules.devices import Devices, place_name
from prunecli.modules.fitting import COMPUTE, TEACHER, WEIGHTS, Need, free_for_each, stored_as
from prunecli.modules.loading import load_model
from prunecli.modules.stock_names import not_run
from prunecli.pipeline import apply
from prunecli.processes import ProcessGroup
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.document import Json
from prunecli.results.rewriting import Training
from prunecli.running.examples import Examples
from prunecli.tensors.dtypes import is_float, parse_dtype
from prunecli.tensors.quantities import bytes_text, counted
from prunecli.tensors.side_files import in_one_line
from prunecli.tensors.transaction import output_error, refuse_target, refuse_unwritable
from prunecli.text.choice import HEADLESS, TextChoice, TrainingTask
from prunecli.text.tokens import load_tokenizer
from prunecli.training.data import TrainingData, make_examples, read_training_data
from prunecli.training.loss import check_logits_file, choose_attention
from prunecli.training.options import LossOptions, TrainingOptions
from prunecli.training.parts import decisive, frozen_weights, prepare, shorten_frozen, trained_outputs
from prunecli.training.state import WEIGHTS as STORED
from prunecli.training.state import (
    Start,
    fill,
    last_checkpoint,
    prepare_state,
    sole_writer,
    state_directory,
)
from prunecli.training.trainer import FinetuneTrainer, Keep, Watch, training_arguments, with_dtype

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
) -> tuple[Any, Json]:
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
            **data.identity(),
            **decisive(options),
            "teacher": {},
            "processes": process_group.world_size,
        }
        if options.teacher is not None:
            with open_model(options.teacher) as teacher:
                identity["teacher"] = {str(options.teacher): teacher.fingerprint}
        if options.teacher_logits is not None:
            identity["teacher_logits"] = True
        prepare_state(state, identity, resume=resume)
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
                if _is_stored_short(source, options):
                    shorten_frozen(model, options)
                return model

            unread: dict[str, None] = {}
            model = build()
            if unread:
                report(f"Not run by {type(model).__name__}, written as they are: {in_one_line([*unread])}")
            examples, objective, validation = make_examples(
                tokenizer,
                model,
                source.path,
                data,
                options,
                arguments.device,
                process_group,
                report,
                progress,
            )
            batches = options.accumulate * process_group.world_size
            tokens = sum(max(lengths) for lengths in examples.lengths)
            if tokens < options.batch_tokens * batches:
                if batches > 1 or "batch_tokens" in options.changed:
                    of = f" x {batches} batches" if batches > 1 else ""
                    raise DataError(
                        f"the training text has {tokens:,} tokens, less than one update of "
                        f"{options.batch_tokens:,}{of}",
                        "Give more text, or a smaller `batch_tokens`.",
                    )
                report(f"The training text has {tokens:,} tokens, less than one update could take.")
            steps = arguments.max_steps = _steps(examples, options, process_group)
            if keep is not None and max(keep.at, default=0) > steps:
                raise UsageError(
                    f"`keep_at`: the run ends after {counted(steps, 'update')}", "Leave later ones out."
                )
            if options.warmup > steps:
                half = arguments.warmup_steps = steps // 2
                report(
                    f"Warm-up of {counted(half, 'update')}, half of the run, instead of {options.warmup:,}."
                )

            def disk_bytes(left: range) -> int:
                """Bytes that the updates `left` hold on the disk at most: the state of the run, and results."""
                learn = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
                one = 3 * learn  # with Adam's moments
                saves = -(-left.stop // options.eval_every)
                stored = None if dtype is None else parse_dtype(dtype)
                result = sum(info.cast(stored).nbytes for info in source.tensors.values())
                kept = 0
                if keep is not None:
                    due = sum(keep.is_due(step + 1) for step in left[:COUNTED_STEPS])
                    # Time may end the run early.
                    kept = result * (due if options.minutes is None else min(due, 1))
                # The Trainer keeps two states, and removes the third once it is written.
                return int(max(min(saves, 3) * one, min(saves, 2) * one + result) + kept)

            limit = None if options.minutes is None else 60 * options.minutes
            with progress("training", None if steps == NO_END else steps, "steps") as advance:
                watch = Watch(process_group, limit, advance, report)
                trainer = FinetuneTrainer(model, arguments, examples, objective, validation, options, watch)
                if keep is not None:
                    keep.whole_model = partial(trainer.whole_model, build)
                    trainer.add_callback(keep)
                if asked_to_shard() and not trainer.is_sharded:
                    report("accelerate shards on GPUs alone: here each process holds the whole model.")
                weights = trainer.run(disk_bytes)
            if process_group.is_main:
                model = build() if trainer.is_sharded else model
                with damaged(f"{weights}: holds other weights", "Start over with `resume=never`."):
                    fill(model, load_file(weights / STORED))
            process_group.all_gather(None)  # the first removes what the others have read by now
            return model, trainer.figures()
    except (KeyboardInterrupt, SystemExit):  # the latter of a polite kill
        last = last_checkpoint(state)
        if process_group.world_size > 1 and last is not None:
            report(f"Stopped: {last} is kept; the same command resumes from it.")
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


def _is_stored_short(checkpoint: Checkpoint, options: TrainingOptions) -> bool:
    """Whether frozen weights can stay in the 16-bit type that they are stored in; sharding wants all of one type."""
    is_same = options.dtype != "float32" and stored_as(checkpoint) == COMPUTE[options.dtype]
    return is_same and not asked_to_shard()


def training_bytes(checkpoint: Checkpoint, options: TrainingOptions, processes: int) -> dict[str, int]:
    """Memory that a training takes on its device, without batches: part -> bytes."""
    trained = weights = weight_bytes(checkpoint, "F32")
    short = 0
    if options.train != "all" or options.lora is not None:
        model = assemble(checkpoint, torch.float32)
        prepare(model, checkpoint, options)
        trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        if _is_stored_short(checkpoint, options):
            short = sum(weight.nbytes for weight in frozen_weights(model, options)) // 2
    parts = {WEIGHTS: weights - short, "gradients": trained, "Adam's moments": 2 * trained}
    if options.lora is not None:
        parts["low-rank updates"] = trained
    if processes > 1:
        parts["gradients of all"] = trained
    if options.dtype != "float32":
        # Autocast keeps them for the backward pass.
        parts[f"{options.dtype} copies"] = weights // 2 - short
    if options.teacher is not None and options.teacher_logits is None:
        with open_model(options.teacher) as teacher:
            parts[TEACHER] = weight_bytes(teacher, parse_dtype(options.dtype))
    return parts


def require_room(
    checkpoint: Checkpoint,
    options: TrainingOptions,
    device: torch.device,
    process_group: ProcessGroup,
    say: Say,
) -> None:
    """Say what it takes, and refuse what does not fit.

    Raises:
        MemoryShortError: with what each part would take.
    """
    processes, weights = process_group.world_size, weight_bytes(checkpoint, "F32")
    whole = parts = training_bytes(checkpoint, options, processes)
    if asked_to_shard() and device.type != "cpu":  # but for the teacher
        parts = {name: size if name == TEACHER else size // processes for name, size in whole.items()}
    free = [free_for_each(device, process_group)]
    needs = [Need(checkpoint, Devices(device), torch.float32, parts, free, trains=True)]
    if device.type != "cpu":  # where each process reads all weights
        host = torch.device("cpu")
        free = [free_for_each(host, process_group)]
        needs.append(Need(checkpoint, Devices(host), torch.float32, {WEIGHTS: weights}, free, trains=True))
    for need in needs:
        if not need.fits():
            raise need.refusal()
    count, learn = weights // 4, whole["gradients"] // 4
    each = sum(size for name, size in parts.items() if name != TEACHER) / max(count, 1)
    detail = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    say(
        f"Training {learn:,} of {count:,} parameters takes {bytes_text(sum(parts.values()))} on {place_name(device)}, "
        f"{each:.1f} bytes a parameter ({detail}); batches come on top."
    )


@dataclass(frozen=True)
class Destination:
    """Directory, type and extras of the result.

    Attributes:
        output: the new checkpoint.
        dtype: of its weights; None: as the source stores them.
        force: replace what is there.
        keep_state: keep the directory of the run's state.
        save_every: also write the model after each so many updates, as a checkpoint in `steps`.
        keep_at: also write it after these.
    """

    output: Path
    dtype: str | None = None
    force: bool = False
    keep_state: bool = False
    save_every: int | None = None
    keep_at: tuple[int, ...] = ()

    @property
    def keeps(self) -> bool:
        """Whether results in its course are kept."""
        return self.save_every is not None or bool(self.keep_at)

    @property
    def steps(self) -> Path:
        """The directory of what is kept in its course."""
        return self.output.with_name(f"{self.output.name}.steps")

    @property
    def figures(self) -> Path:
        """The file that the training's figures go to."""
        return self.output.with_name(f"{self.output.name}.finetune.json")

    def check(self, source: Path | None) -> None:
        """Refuse before the work what would be refused after it.

        Raises:
            OutputError: what cannot be written.
        """
        refuse_target(self.output, force=self.force, source=source)
        refuse_unwritable(self.figures, force=self.force)
        is_resumed = state_directory(self.output).is_dir()
        if self.keeps and self.steps.exists() and not (self.force or is_resumed):
            raise OutputError(
                f"{self.steps}: exists already", "Choose another `output`, or replace it with `force`."
            )


def finetune(
    start: Start | Path | str,
    choice: TextChoice | TrainingData,
    destination: Destination | Path | str,
    options: TrainingOptions | None = None,
    *,
    valid: TextChoice | None = None,
    task: TrainingTask | None = None,
    resume: bool = True,
    dry_run: bool = False,
    progress: Progress = silent,
    say: Say = unsaid,
) -> tuple[Training, StockSupport] | None:
    """Train, write the best model as a checkpoint, and the training's figures beside it.

    Args:
        start: what training begins with; a path or name: that checkpoint.
        choice: the text that is trained on; if it is read already, with that to validate with.
        destination: where the result goes; a path: a new directory.
        valid: that to validate with; see `read_training_data`.
        task: None: what the model is for.
        resume: go on where the same call was interrupted.
        dry_run: only check options, model and text; `say` is called with what would be done.
        say: hears what is chosen by itself, of each validation, and what the result lacks.

    Returns:
        The figures, and whether plain transformers opens the result; None on other processes than the first.

    Raises:
        PruneError: options, model, text or output that cannot be used; a loss that is not finite.
    """
    start = start if isinstance(start, Start) else Start(Path(start))
    if not isinstance(destination, Destination):
        destination = Destination(Path(destination))
    options, valid = with_dtype(options or TrainingOptions()), valid or TextChoice()
    if options.lora is not None:
        require_package(PEFT, "`lora`")
    destination.check(start.checkpoint)
    _checked = start.identity  # refuses what cannot be trained
    if isinstance(choice, TrainingData):
        task = choice.task
    else:
        task = task or start.task(say)
        held = {"valid_split": valid.split, "valid_text": valid.files, "valid_labelled": valid.labelled}
        validating = [name for name, value in held.items() if value]
        choice.check_task(task, validating, also_plain=("feature-extraction",))
    if task in HEADLESS:
        what = "vectors" if task == "embedding" else "hidden states"
        if options.teacher is None:
            raise UsageError(
                f"`task={task}`: the model learns a teacher's {what}",
                "Name the model that it comes from with `teacher=DIR`.",
            )
        if task == "embedding" and start.config is not None:
            raise UsageError(
                "`task=embedding` does not go with `from_scratch`: no config.json says how texts are pooled",
                "Train a checkpoint that prune-layers or another command made of the teacher.",
            )
        # What is left where there are no logits.
        hidden = options.loss.hidden or (1.0 if task == "feature-extraction" else 0.0)
        options = options.updated(loss=LossOptions(label_smoothing=0.0, hidden=hidden))
    if options.teacher_logits is not None:
        check_logits_file(options.teacher_logits, task)
        if options.teacher is None or options.loss.hidden:
            raise UsageError(
                "`teacher_logits` needs a `teacher`, and no `hidden_weight`", "The file holds logits alone."
            )
    data = choice if isinstance(choice, TrainingData) else read_training_data(task, choice, valid, say)
    if task != "translation" and options.metric != "loss":
        raise UsageError(f"`metric={options.metric}` goes with `task=translation`", "Leave it out.")
    if data.valid is None:
        options.refuse(("metric", "patience"), "needs text to validate with", "Name some, or leave it out.")
    if dry_run:
        ends = {"update": options.steps, "epoch": options.epochs, "minute": options.minutes}
        until = " or ".join(counted(count, name) for name, count in ends.items() if count is not None)
        beside = "" if options.teacher is None else f", taught by {options.teacher}"
        say(
            f"Dry run: would train {start.path} for {task} on {len(data.train) * max(len(data.pairs), 1):,} "
            f"texts{beside}, for {until}, and write {destination.output}; nothing is trained or written."
        )
        return None
    state = state_directory(destination.output)
    if destination.keeps and not state.is_dir():
        for path in destination.steps.glob("step-*/config.json"):  # of an earlier run
            shutil.rmtree(path.parent)

    def result(source: Checkpoint, model: Any, log: Json) -> Rewrite:
        """The rewrite of the checkpoint that training began with to the weights of the model."""
        arguments = {
            **data.describe(),
            **given(decisive(options)),
            "steps": log["steps"],
        }
        if log.get("best"):
            arguments["best"] = log["best"]["step"]
        if options.teacher is not None:
            with open_model(options.teacher) as teacher:
                arguments["teacher"] = named(teacher)
            if options.teacher_logits is not None:
                arguments["teacher_logits"] = True
        if start.config is not None:
            arguments["from_scratch"] = source.model_type
        step = history_step("finetune", source if start.config is None else None, arguments)
        outputs = trained_outputs(model, source)
        return rewritten(source, source.structure, outputs, step, dtype=destination.dtype)

    def keep(model: Any, step: int) -> None:
        destination.steps.mkdir(exist_ok=True)
        with start.open(state) as source:
            rewrite = result(source, model, {"steps": step})
            apply(source, rewrite, destination.steps / f"step-{step}", force=True)

    with sole_writer(destination.output) if processes.rank() == 0 else nullcontext():
        model, log = train(
            start,
            data,
            options,
            state,
            dtype=destination.dtype,
            resume=resume,
            progress=progress,
            report=say,
            keep=Keep(destination.save_every, destination.keep_at, keep) if destination.keeps else None,
        )
        if processes.rank() != 0:
            return None
        try:
            with start.open(state) as source:
                rewrite = result(source, model, log)
                left_out = source.side_files.left_out
                if left_out:
                    say(f"Left out, as no part of the model: {in_one_line(left_out)}")
                support = stock_support(source, rewrite.structure)
                training = Training(  # before anything is written: a record refuses figures that cannot be
                    **Training.header([] if start.config is not None else [source], options.seed),
                    left_out=[*left_out],
                    output=str(destination.output),
                    stock=support.to_json(),
                    arguments=rewrite.structure.history[-1]["arguments"],
                    **log,
                )
                apply(source, rewrite, destination.output, force=destination.force)
            training.write(destination.figures, force=True)
        except (OSError, OutputError) as error:
            # The weights took hours: whatever the disk refused, the next run only has to write them again.
            failed = error if isinstance(error, OutputError) else output_error(destination.output, error)
            force = " with `force`" if destination.output.exists() else ""
            raise OutputError(
                f"{failed.message}; the trained weights are stored in {state}",
                f"Free some space, then repeat the same command{force}: it only writes the result.",
            ) from error
        if not destination.keep_state:
            shutil.rmtree(state, ignore_errors=True)
        return training, support
