"""The quality of checkpoints side by side, at what they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli import processes
from prunecli.errors import PruneError, UsageError
from prunecli.evaluation.options import EvaluationOptions
from prunecli.evaluation.scoring import spm_file, spm_missing
from prunecli.evaluation.significance import LEAST
from prunecli.evaluation.translation import evaluate_translation, translations_kept
from prunecli.model.checkpoint import Checkpoint, directory_of
from prunecli.model.history import pruned_pairs
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.tensors.directory import read_config
from prunecli.tensors.quantities import counted
from prunecli.text.choice import Dataset, TextChoice
from prunecli.text.parallel import ParallelText
from prunecli.text.tasks import TaskName, task_of, task_of_all

if TYPE_CHECKING:
    from prunecli.results.evaluation import Evaluation
    from prunecli.running.layerwise.runner import RunReport


def evaluate(
    checkpoints: Mapping[str, Checkpoint | Path | str],
    choice: TextChoice,
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
    """Measure each checkpoint at `task` on the text that `choice` names, compare with the first.

    Where no pairs are chosen, those are translated that the checkpoints were pruned for. Several processes share the
    sentences of a translation; an interrupted one goes on from what lies beside `output`.

    Args:
        checkpoints: label -> an open model, a directory or a name of the hub, the baseline first.
        output: file that the result is written to; None: none, and nothing to go on from.
        task: None: what the models are for.
        force: replace `output`.
        say: hears what is chosen by itself, and why.
        warn: hears what is left behind by an interrupt.
        report: called for each checkpoint that was run layer by layer with what that took.

    Returns:
        The result; None on other processes than the first.

    Raises:
        PruneError: a checkpoint, text, option or output that cannot be used.
    """
    if not checkpoints:
        raise UsageError("no checkpoint is given", "Give one or several: {label: directory}.")
    options = options or EvaluationOptions()
    output = None if output is None else Path(output)
    directories = {label: directory_of(model, say) for label, model in checkpoints.items()}
    task = task or task_of_all(list(directories.values()), task_of)
    choice.check(task, options.given)
    options.gate.check(task, len(directories))
    if task == "translation":
        return _translation(directories, choice, options, output, force, progress, say, warn)
    from prunecli.evaluation.tasks import evaluate_task

    if processes.world_size() > 1:
        raise UsageError(f"--task {task}: one process does it", "Start it without torchrun.")
    return evaluate_task(
        directories,
        choice.read(task, say),
        options,
        output,
        force=force,
        progress=progress,
        report=report,
        say=say,
    )


def _translation(
    checkpoints: Mapping[str, Path],
    choice: TextChoice,
    options: EvaluationOptions,
    output: Path | None,
    force: bool,
    progress: Progress,
    say: Say,
    warn: Say,
) -> Evaluation | None:
    data = choice.read("translation", say)
    if choice.pairs is None:
        data = _pruned_for(list(checkpoints.values()), data, say)
    if options.most_translations is not None:
        data = _at_most(options.most_translations, len(checkpoints), data, say)
    for path in checkpoints.values():  # before a word on what is left out
        read_config(path)
    options = replace(options, spm=spm_file(options.spm))
    if options.spm is None:
        say(spm_missing())
    kept = translations_kept(output)
    if kept.records:
        say(f"Going on from {kept.path}, which an interrupted run left behind.")
    try:
        with processes.together() as process_group:
            return evaluate_translation(
                checkpoints,
                data,
                options,
                output,
                force=force,
                progress=progress,
                process_group=process_group,
                say=say,
            )
    except (KeyboardInterrupt, SystemExit, PruneError):
        if kept.path is not None and kept.path.is_file():
            warn("Finished pairs are kept: the same command goes on from them.")
        raise


def _pruned_for(checkpoints: Sequence[Path], data: Dataset, say: Say) -> Dataset:
    """Only the pairs that the pruned checkpoints were pruned for, where that is anything."""
    kept = pruned_pairs(checkpoints, data.pairs)
    if not kept or kept == data.pairs:
        return data
    say(
        f"{len(kept)} of {len(data.pairs)} pairs: what the checkpoints were pruned for (--pairs chooses others)."
    )
    return replace(data, pairs=kept)


def _at_most(count: int, checkpoints: int, data: Dataset, say: Say) -> Dataset:
    """At most `count` translations: first fewer sentences, as many as a test takes; then every n-th pair."""
    text, pairs = data.text, data.pairs
    assert isinstance(text, ParallelText)
    sentences = min(len(text), max(LEAST, count // (checkpoints * len(pairs))))
    pairs = pairs[:: -(-checkpoints * len(pairs) * sentences // count)]
    if (sentences, pairs) == (len(text), data.pairs):
        return data
    say(
        f"About a minute: {counted(checkpoints, 'checkpoint')} x {len(pairs)} of {counted(len(data.pairs), 'pair')} x "
        f"{sentences} of {counted(len(text), 'sentence')}. --all takes everything."
    )
    return replace(data, text=text.first(sentences), pairs=pairs)
