"""finetune, from a choice of text to a checkpoint and its figures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from prunecli import processes
from prunecli.errors import OutputError, UsageError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.conversion import PEFT, require_package
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.model.stock import StockSupport, stock_support
from prunecli.pipeline import apply
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.document import header
from prunecli.results.rewriting import Training
from prunecli.tensors.documents import refuse_unwritable, write_json
from prunecli.tensors.side_files import in_one_line
from prunecli.tensors.transaction import output_error, refuse_target
from prunecli.text.choice import TextChoice
from prunecli.text.tasks import HEADLESS, TrainingTask
from prunecli.training.data import TrainingData, read_training_data
from prunecli.training.loss import headless_loss
from prunecli.training.options import TrainingOptions
from prunecli.training.parts import finetune_step, outputs_of, stage
from prunecli.training.start import Start
from prunecli.training.state import sole_writer, state_directory
from prunecli.training.teacher_logits import check_logits_file
from prunecli.training.train import train
from prunecli.training.watch import Keep


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


def _preview(start: Start, data: TrainingData, options: TrainingOptions, destination: Destination) -> str:
    """Return the line that says what a run would do."""
    ends = {"updates": options.steps, "epochs": options.epochs, "minutes": options.minutes}
    until = " or ".join(f"{count:g} {name}" for name, count in ends.items() if count is not None)
    beside = "" if options.teacher is None else f", taught by {options.teacher}"
    texts = len(data.train) * max(len(data.pairs), 1)
    return (
        f"Dry run: would train {start.path} for {data.task} on {texts:,} texts{beside}, for {until}, and "
        f"write {destination.output}; nothing is trained or written."
    )


def finetune(
    start: Start | Path | str,
    choice: TextChoice,
    destination: Destination | Path | str,
    options: TrainingOptions | None = None,
    *,
    valid: TextChoice | None = None,
    task: TrainingTask | None = None,
    resume: bool = True,
    dry_run: bool = False,
    progress: Progress = silent,
    say: Say = unsaid,
    warn: Say = unsaid,
) -> tuple[Training, StockSupport] | None:
    """Train, write the best model as a checkpoint, and the training's figures beside it.

    Args:
        start: what training begins with; a path or name: that checkpoint.
        choice: the text that is trained on.
        destination: where the result goes; a path: a new directory.
        valid: that to validate with; see `read_training_data`.
        task: None: what the model is for.
        resume: go on where the same call was interrupted.
        dry_run: only check options, model and text; `say` is called with what would be done.
        say: hears what is chosen by itself, and of each validation.
        warn: hears what the result lacks.

    Returns:
        The figures, and whether plain transformers opens the result; None on other processes than the first.

    Raises:
        PruneError: options, model, text or output that cannot be used; a loss that is not finite.
    """
    start = start if isinstance(start, Start) else Start(Path(start))
    if not isinstance(destination, Destination):
        destination = Destination(Path(destination))
    options, valid = options or TrainingOptions(), valid or TextChoice()
    if options.lora is not None:
        require_package(PEFT, "`lora`")
    destination.check(start.checkpoint)
    _checked = start.identity  # refuses what cannot be trained
    task = task or start.task(say)
    validating = {
        "valid_split": valid.split is not None,
        "valid_text": bool(valid.files),
        "valid_labelled": valid.labelled is not None,
    }
    choice.check_task(task, validating, also_plain=("feature-extraction",))
    if task in HEADLESS:
        what = "vectors" if task == "embedding" else "hidden states"
        if options.teacher is None:
            raise UsageError(
                f"`task={task}`: a model without a head learns a teacher's {what}",
                "Name the model that it comes from with `teacher=DIR`.",
            )
        if task == "embedding" and start.config is not None:
            raise UsageError(
                "`task=embedding` does not go with `from_scratch`: no config.json says how texts are pooled",
                "Train a checkpoint that prune-layers or another command made of the teacher.",
            )
        options = options.model_copy(update={"loss": headless_loss(options.loss, task)})
    if options.teacher_logits is not None:
        check_logits_file(options.teacher_logits, task)
        if options.teacher is None or options.loss.hidden:
            raise UsageError(
                "`teacher_logits` needs a `teacher`, and no `hidden_weight`", "The file holds logits alone."
            )
    data = read_training_data(task, choice, valid, say)
    if task != "translation" and options.metric != "loss":
        raise UsageError(f"`metric={options.metric}` goes with `task=translation`", "Leave it out.")
    if dry_run:
        say(_preview(start, data, options, destination))
        return None
    state = state_directory(destination.output)
    if destination.keeps and not state.is_dir():
        for path in destination.steps.glob("step-*/config.json"):  # of an earlier run
            shutil.rmtree(path.parent)

    @contextmanager
    def staged(model: Any, log: Mapping[str, Any]) -> Iterator[tuple[Checkpoint, Checkpoint, Rewrite]]:
        """The source, the model's weights as a checkpoint, and the rewrite to the result."""
        with start.open(state) as source:
            stage(model, source, state / "result")
            with open_model(state / "result") as weights:
                step = finetune_step(source, start.config, data, options, log)
                outputs = outputs_of(source, weights, destination.dtype)
                yield source, weights, rewritten(weights, source.structure, outputs, step)

    def keep(model: Any, step: int) -> None:
        destination.steps.mkdir(exist_ok=True)
        with staged(model, {"steps": step}) as (_, weights, rewrite):
            apply(weights, rewrite, destination.steps / f"step-{step}", force=True)
        shutil.rmtree(state / "result")

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
            with staged(model, log) as (source, weights, rewrite):
                left_out = source.side_files.left_out
                if left_out:
                    warn(f"Left out, as no part of the model: {in_one_line(left_out)}")
                support = stock_support(weights, rewrite.structure)
                training = Training(  # before anything is written: a record refuses figures that cannot be
                    **header(Training.FORMAT, [] if start.config is not None else [source], options.seed),
                    left_out=[*left_out],
                    output=str(destination.output),
                    stock=support.to_json(),
                    arguments=rewrite.structure.history[-1]["arguments"],
                    **log,
                )
                apply(weights, rewrite, destination.output, force=destination.force)
            write_json(destination.figures, training.to_json(), force=True)
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
