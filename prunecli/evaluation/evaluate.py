"""Measure the quality of checkpoints on the same text, and compare them with the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from prunecli import processes
from prunecli.errors import PruneError, UsageError
from prunecli.evaluation.language_model import CausalLanguageModel
from prunecli.evaluation.latency import threads, threads_for
from prunecli.evaluation.options import EvaluationOptions
from prunecli.evaluation.scoring import LEAST, SPM_MISSING, spm_file
from prunecli.evaluation.tasks import Classification, Embedding, MaskedLanguageModel, Task
from prunecli.evaluation.translation import TranslationTask
from prunecli.model.checkpoint import Checkpoint, directory_of, open_model
from prunecli.model.history import pruned_pairs
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.document import header
from prunecli.results.evaluation import Evaluation
from prunecli.running.layerwise.runner import RunReport
from prunecli.tensors.directory import read_config
from prunecli.tensors.documents import partial_path, refuse_unwritable
from prunecli.tensors.quantities import counted
from prunecli.text.choice import Dataset, TextChoice
from prunecli.text.parallel import ParallelText
from prunecli.text.tasks import TaskName, task_of, task_of_all

TASK_CLASSES: Mapping[TaskName, type[Task]] = {
    "translation": TranslationTask,
    "lm": CausalLanguageModel,
    "mlm": MaskedLanguageModel,
    "classification": Classification,
    "embedding": Embedding,
}


def evaluate(
    checkpoints: Mapping[str, Checkpoint | Path | str],
    choice: TextChoice | Dataset,
    options: EvaluationOptions | None = None,
    output: str | Path | None = None,
    *,
    task: TaskName | None = None,
    force: bool = False,
    progress: Progress = silent,
    say: Say = unsaid,
    warn: Say = unsaid,
    report: Callable[[str, RunReport], None] = lambda _label, _run: None,
) -> Evaluation | None:
    """Measure each checkpoint at `task` on the text that `choice` names, and compare it with the first.

    If no pairs are chosen, translation takes the pairs that the checkpoints were pruned for. Several processes share
    the sentences of a translation; an interrupted translation resumes from the state stored beside `output`.

    Args:
        checkpoints: label -> an open model, a directory or a name on the hub, the baseline first.
        choice: the text, named or read. Text that was read states its task.
        output: file for the result; None: nothing is written, and an interrupted run cannot resume.
        task: None: the task of the models.
        force: replace `output`.
        say: called with each automatic choice and its reason.
        warn: called with a line about the state that an interrupt leaves behind.
        report: called for each checkpoint that was run layer by layer with statistics of the run.

    Returns:
        The result; None on processes other than the first.

    Raises:
        PruneError: a checkpoint, text, option or output that cannot be used.
    """
    if not checkpoints:
        raise UsageError("no checkpoint is given", "Give one or several: {label: directory}.")
    options = options or EvaluationOptions()
    output = None if output is None else Path(output)
    paths = {label: directory_of(model, say) for label, model in checkpoints.items()}
    directories = list(paths.values())
    task = choice.task if isinstance(choice, Dataset) else task or task_of_all(directories, task_of)
    options.check_limits(task, len(paths))
    if isinstance(choice, Dataset):
        data = choice
    else:
        choice.check_task(task, options.of_tasks)
        if task != "translation" and processes.world_size() > 1:
            raise UsageError(f"`task={task}`: one process does it", "Start it without torchrun.")
        data = choice.read(task, say)
        kept = data.pairs
        if task == "translation" and choice.pairs is None:
            kept = pruned_pairs(directories, kept) or kept
        if kept != data.pairs:
            say(
                f"{len(kept)} of {len(data.pairs)} pairs: those of the pruned checkpoints (`pairs` takes others)."
            )
            data = replace(data, pairs=kept)
    if task == "translation":
        if options.most_translations is not None:
            data = _at_most(options.most_translations, len(paths), data, say)
        for path in directories:  # a missing checkpoint is reported before missing scores
            read_config(path)
        options = options.model_copy(update={"spm": spm_file(options.spm)})
        if options.spm is None:
            say(SPM_MISSING)
    try:
        with processes.together() as group:
            with group.in_step():
                if output is not None and group.is_main:  # before the work
                    refuse_unwritable(output, force=force)
            opened = {label: open_model(path) for label, path in paths.items()}
            measured = TASK_CLASSES[task](opened, data, options, progress, say, group, report, output, force)
            with closing(measured), threads(threads_for(opened.values())):
                for label in opened:
                    measured.measure(label)
            if not group.is_main:
                return None
            head = header(Evaluation.FORMAT, [*opened.values()], measured.seed)
            evaluation = Evaluation.model_validate({**head, "task": task, **measured.fields()})
            measured.save(evaluation)
            return evaluation
    except (KeyboardInterrupt, SystemExit, PruneError):
        if output is not None and task == "translation" and partial_path(output).is_file():
            warn("Finished pairs are kept: the same command goes on from them.")
        raise


def _at_most(count: int, checkpoints: int, data: Dataset, say: Say) -> Dataset:
    """Limit the number of translations: fewer sentences, down to those that a test needs; then every n-th pair."""
    text, pairs = data.text, data.pairs
    assert isinstance(text, ParallelText)
    sentences = min(len(text), max(LEAST, count // (checkpoints * len(pairs))))
    pairs = pairs[:: -(-checkpoints * len(pairs) * sentences // count)]
    if (sentences, pairs) == (len(text), data.pairs):
        return data
    say(
        f"About a minute: {counted(checkpoints, 'checkpoint')} x {len(pairs)} of {counted(len(data.pairs), 'pair')} x "
        f"{sentences} of {counted(len(text), 'sentence')} (`everything`: all)."
    )
    return replace(data, text=text.first(sentences), pairs=pairs)
