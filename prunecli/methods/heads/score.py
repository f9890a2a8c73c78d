"""Score the heads of a checkpoint on text, by gradients (1905.10650, 4.1) or by masks (3.2, 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prunecli.errors import UsageError
from prunecli.evaluation.options import labels_for
from prunecli.methods.gradients import gradient_fields
from prunecli.methods.heads.ablate import Ablation
from prunecli.methods.options import EffectMetric
from prunecli.methods.scoring import ScoreOptions
from prunecli.model.axes import Axis, Kind, axis_name
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.find_axes import axes_of
from prunecli.modules.devices import choose_devices
from prunecli.modules.fitting import decoding, decoding_room, dtype_name, fitting_dtype, nothing
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.unit_scores import Scores, scores_of
from prunecli.running.layerwise.runner import RunReport, make_runner
from prunecli.tensors.documents import refuse_unwritable, write_json
from prunecli.text.choice import TextChoice
from prunecli.text.plain import PlainText
from prunecli.text.tasks import TaskName, task_of
from prunecli.text.tokens import load_tokenizer

METRICS_OF: dict[TaskName, tuple[EffectMetric, ...]] = {
    "translation": ("chrf++", "bleu", "loss"),
    "classification": ("accuracy", "loss"),
    "mlm": ("loss",),
    "lm": ("loss",),
    "embedding": ("cosine",),
}
"""Metrics that ablation can measure at each task; the first is the default."""


def score_heads(
    model: Checkpoint | Path | str,
    choice: TextChoice,
    options: ScoreOptions | None = None,
    output: str | Path | None = None,
    *,
    task: TaskName | None = None,
    force: bool = False,
    progress: Progress = silent,
    say: Say = unsaid,
    report: Callable[[RunReport], None] = lambda _run: None,
) -> Scores:
    """Score each attention head by what the model loses without it (1905.10650, 3 and 4.1).

    Args:
        model: an open model, a directory or a name of the hub.
        choice: the text.
        output: file that the scores are written to, if any.
        task: task of the text. If None, the task of the model.
        force: replace `output`.
        say: called with lines about choices made by default.
        report: called with the costs of a run layer by layer.

    Raises:
        PruneError: a model, text, option or output that cannot be used.
    """
    options = options or ScoreOptions()
    options.check_options()
    if output is not None:
        refuse_unwritable(Path(output), force=force)
    checkpoint = model if isinstance(model, Checkpoint) else open_model(model)
    layers = (
        checkpoint.layout.require_heads()
    )  # a family that is not declared is refused before anything heavy
    task = task or task_of(checkpoint)
    choice.check_task(task)
    data = choice.read(task, say)
    selecting = choice.selecting(task, options.select_data, options.select_split)
    selected = None if selecting is None else selecting.read(task, say)
    metric = chosen_metric(task, options.measure)
    devices = choose_devices(options.device)
    is_gradient, load = options.metric == "gradient", options.decoding.load
    dtype = fitting_dtype(
        dict.fromkeys(labels_for([checkpoint.path]), checkpoint),
        devices,
        options.dtype,
        beside=nothing if is_gradient else decoding(load),
        gradients=is_gradient,
        memory=options.memory,
        by_layer="--memory" if is_gradient else "",
        say=say,
    )
    run, room = RunReport(), 0 if is_gradient else decoding_room(checkpoint, load, dtype)
    runner = make_runner(checkpoint, devices, dtype, options.memory, options.spill_directory, run, room=room)
    fields = {
        "kind": "head",
        "method": options.metric,
        "task": task,
        "ids": {axis_name(layer.name, "head"): layer.heads for layer in layers},
    }
    if is_gradient:
        axes: dict[Kind, tuple[Axis, ...]] = {"head": axes_of(checkpoint, "head")}
        fields |= gradient_fields(
            checkpoint, runner, data, axes, options.batch_tokens, options.per or "example", progress
        )["head"]
    else:
        ablation = Ablation(
            checkpoint, runner.model, load_tokenizer(checkpoint.path), metric, options, progress
        )
        fields |= ablation.scores(data, selected)
    if options.memory is not None:
        report(run)
    scores = scores_of(
        checkpoint,
        None if is_gradient else options.seed,
        texts=choice.texts,
        split=choice.split_read,
        whole_files=data.text.whole_files if isinstance(data.text, PlainText) else None,
        dtype=dtype_name(dtype),
        **fields,
    )
    if output is not None:
        write_json(Path(output), scores.to_json(), force=force)
    return scores


def chosen_metric(task: TaskName, metric: str | None) -> EffectMetric:
    """Return `metric`, or the task's default.

    Raises:
        UsageError: the task has no such metric.
    """
    known = METRICS_OF[task]
    for name in known:
        if metric in (None, name):
            return name
    raise UsageError(f"`measure={metric}`: not one of {task}", f"Choose from {', '.join(known)}.")
