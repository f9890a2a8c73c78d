"""What `finetune` does once its options are read: check, train, write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli import processes
from prunecli.commands import console
from prunecli.errors import UsageError
from prunecli.progress import unsaid

if TYPE_CHECKING:
    from prunecli.model.stock import Verdict
    from prunecli.results.training import Training
    from prunecli.text.choice import TextChoice
    from prunecli.text.tasks import TrainingTask
    from prunecli.training.data import TrainingData
    from prunecli.training.finetune import Trained
    from prunecli.training.options import TrainingOptions
    from prunecli.training.start import Start


@dataclass(frozen=True)
class How:
    """--resume, --quiet and --json; the options that were given which are of a loss of logits alone."""

    resume: bool
    quiet: bool
    json: bool
    of_logits: tuple[str, ...] = ()


class Writing:
    """Where the result goes, and how."""

    def __init__(self, output: Path, dtype: str | None, force: bool, keep_state: bool) -> None:
        self.output, self.dtype, self.force, self.keep_state = output, dtype, force, keep_state
        self.figures = output.with_name(f"{output.name}.finetune.json")

    def check(self, source: Path | None) -> None:
        """Refuse before the work what would be refused after it."""
        from prunecli.tensors.documents import refuse_unwritable
        from prunecli.tensors.transaction import refuse_target

        refuse_target(self.output, force=self.force, source=source)
        refuse_unwritable(self.figures, force=self.force)


def run(
    start: Start,
    choice: TextChoice,
    valid: TextChoice,
    task: TrainingTask | None,
    options: TrainingOptions,
    writing: Writing,
    how: How,
) -> None:
    """Check everything, train, write the checkpoint and its figures.

    Raises:
        PruneError: options, model, text or output that cannot be used; a loss that is not finite.
    """
    from prunecli import demo
    from prunecli.commands.checkpoints import checkpoint_directory, checkpoint_or_demo
    from prunecli.tensors.hub.names import local_path
    from prunecli.training.data import read_training_data

    writing.check(local_path(start.checkpoint))  # before anything is fetched
    if start.config is None:
        quiet_demo = how.quiet and start.checkpoint is None
        start = replace(
            start, checkpoint=demo.CHECKPOINT if quiet_demo else checkpoint_or_demo(start.checkpoint)
        )
    writing.check(start.checkpoint)
    if options.teacher is not None:
        options = replace(options, teacher=checkpoint_directory(options.teacher))
    identity = start.identity()
    task = task or start.task()
    validating = {
        "--valid-split": valid.split is not None,
        "--valid-text": bool(valid.files),
        "--valid-labelled": valid.labelled is not None,
    }
    choice.check(task, validating, also_plain=("feature-extraction",))
    if task == "feature-extraction":
        options = _learning_features(options, how.of_logits)
    say = unsaid if how.quiet else console.note
    data = read_training_data(task, choice, valid, say)
    if data.task != "translation" and options.metric != "loss":
        raise UsageError(f"--metric {options.metric} goes with --task translation", "Leave it out.")

    from prunecli.training.finetune import finetune as train
    from prunecli.training.state import state_directory

    state = state_directory(writing.output)
    trained = train(
        lambda: start.open(state),
        data,
        options,
        state,
        origin=identity,
        origin_files=start.files(identity),
        resume=how.resume,
        progress=console.progress(how.quiet or how.json),
        report=say,
    )
    if trained.is_main:
        training, verdict = _publish(start, data, options, trained, state, writing)
        if how.json:
            console.print_json(training.to_json())
        elif not how.quiet:
            _show(training, verdict, writing)
    processes.leave()


def _learning_features(options: TrainingOptions, of_logits: tuple[str, ...]) -> TrainingOptions:
    from prunecli.training.loss import feature_loss

    if of_logits:
        raise UsageError(
            f"{' and '.join(of_logits)} {'goes' if len(of_logits) == 1 else 'go'} with models that have a head, not "
            "with --task feature-extraction",
            "Leave it out." if len(of_logits) == 1 else "Leave them out.",
        )
    if options.teacher is None:
        raise UsageError(
            "--task feature-extraction: a model without a head learns a teacher's hidden states",
            "Name the model that it comes from with --teacher DIR.",
        )
    return replace(options, loss=feature_loss(options.loss))


def _publish(
    start: Start,
    data: TrainingData,
    options: TrainingOptions,
    trained: Trained,
    state: Path,
    writing: Writing,
) -> tuple[Training, Verdict]:
    import shutil

    from prunecli.commands.rewriting import not_carried
    from prunecli.model.checkpoint import open_model
    from prunecli.model.rewrite import rewritten
    from prunecli.pipeline import apply
    from prunecli.results.header import header
    from prunecli.results.training import Training
    from prunecli.tensors.documents import write_json
    from prunecli.training.result import finetune_step, outputs_of

    with start.open(state) as source, open_model(trained.staged) as weights:
        step = finetune_step(source, start.config, data, options, trained.log)
        outputs = outputs_of(source, weights, writing.dtype)
        for line in not_carried(source):
            console.note(line)
        rewrite = rewritten(weights, source.structure, outputs, step)
        verdict = apply(weights, rewrite, writing.output, force=writing.force).verdict
        training = Training(
            **header(Training.FORMAT, [] if start.config is not None else [source], options.seed),
            left_out=[*source.side_files.left_out],
            output=str(writing.output),
            stock=verdict.to_json(),
            arguments=step["arguments"],
            **trained.log,
        )
    write_json(writing.figures, training.to_json(), force=True)
    if not writing.keep_state:
        shutil.rmtree(state, ignore_errors=True)
    return training, verdict


def _show(training: Training, verdict: Verdict, writing: Writing) -> None:
    from prunecli.commands.rewriting import opened_by

    rows = [
        [f"{step.step:,}", f"{step.loss:.4f}", "-" if step.chrf is None else f"{step.chrf:.2f}"]
        for step in training.validation[-10:]
    ]
    if rows:
        console.show(console.table("Validation", ("step", "loss", "chrF++"), rows))
    best = training.best
    chosen = f"; the best, of step {best['step']:,}, is the result" if best else ""
    speed = f"{training.tokens:,} tokens, {training.tokens_per_second:,.0f} a second"
    console.out(f"{training.steps:,} updates, {speed}{chosen}")
    console.out(verdict.line)
    console.out(f"Written: {writing.output} ({opened_by(verdict)}), figures in {writing.figures}")
