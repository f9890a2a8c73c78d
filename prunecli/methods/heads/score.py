"""Score the heads of a checkpoint on text, by gradients (1905.10650, 4.1) or by masks (3.2, 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prunecli.errors import PruneError, UsageError
from prunecli.evaluation.options import labels_for
from prunecli.methods.heads.ablate import Ablation
from prunecli.methods.options import EffectMetric
from prunecli.methods.scoring import ScoreOptions
from prunecli.model.axes import axis_name
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.parts import AttentionLayer
from prunecli.modules.devices import choose_devices
from prunecli.modules.fitting import candidates, decoding, decoding_room, dtype_name, fitting_dtype, nothing
from prunecli.modules.hooks import output_projections
from prunecli.modules.loading import load_model
from prunecli.modules.pooling import read_pooling
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.unit_scores import Per, Scores, scores_of
from prunecli.running.batches import task_batches
from prunecli.running.examples import Batch
from prunecli.running.layerwise.runner import Layerwise, Resources, RunReport
from prunecli.running.losses import Losses, differentiate_losses, example_losses, random_projections
from prunecli.running.runner import InMemory, Runner
from prunecli.tensors.documents import refuse_unwritable, write_json
from prunecli.text.choice import Dataset, TextChoice
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
    if options.memory is not None:
        dtype = candidates(options.dtype, [checkpoint], devices.first, gradients=True)[0]
    else:
        dtype = fitting_dtype(
            dict.fromkeys(labels_for([checkpoint.path]), checkpoint),
            devices,
            options.dtype,
            beside=nothing if is_gradient else decoding(load),
            gradients=is_gradient,
            by_layer="--memory" if is_gradient else "",
            say=say,
        )
    tokenizer = load_tokenizer(checkpoint.path)
    run = RunReport()
    runner: Runner
    if options.memory is not None:
        resources = Resources(devices.first, dtype, options.memory, options.spill_directory)
        runner = Layerwise(checkpoint, resources, run)
    else:
        room = 0 if is_gradient else decoding_room(checkpoint, load, dtype)
        runner = InMemory(load_model(checkpoint.path, device=devices, dtype=dtype, room=room))
    if is_gradient:
        fields = _by_gradient(runner, checkpoint, tokenizer, data, options, progress)
    else:
        ablation = Ablation(checkpoint, runner.model, tokenizer, metric, options, progress)
        fields = ablation.scores(data, selected)
    if options.memory is not None:
        report(run)
    scores = scores_of(
        checkpoint,
        None if is_gradient else options.seed,
        kind="head",
        method=options.metric,
        task=task,
        texts=choice.texts,
        split=choice.split_read,
        whole_files=data.text.whole_files if isinstance(data.text, PlainText) else None,
        dtype=dtype_name(dtype),
        ids={axis_name(layer.name, "head"): layer.heads for layer in layers},
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


def _by_gradient(
    runner: Runner,
    checkpoint: Checkpoint,
    tokenizer: Any,
    data: Dataset,
    options: ScoreOptions,
    progress: Progress,
) -> dict[str, Any]:
    """Fields of `Scores`: importance of every head (4.1), summed over the examples of `data`, or over their tokens.

    L(x) is the loss of the task; for `embedding` it is `random_projections`.
    """
    layers = checkpoint.layout.own_attentions
    pooling = read_pooling(checkpoint.path) if data.task == "embedding" else None
    losses_of = example_losses if pooling is None else partial(random_projections, pooling)
    by_text = task_batches(tokenizer, runner.model, data, options.batch_tokens, pooling)
    per = options.per or "example"
    sums = gradient_importance(runner, layers, by_text, progress, per=per, losses_of=losses_of)
    batches = [batch for of_text in by_text.values() for batch in of_text]
    examples = sum(len(batch.indices) for batch in batches)
    counts = {}
    for layer in layers:
        mask = "attention_mask" if layer.kind == "encoder" else "decoder_attention_mask"
        masks = [batch.inputs.get(mask, batch.inputs["attention_mask"]) for batch in batches]
        tokens = sum(int(own.sum()) for own in masks)
        counts[axis_name(layer.name, "head")] = examples if per == "example" else tokens
    values = {axis_name(name, "head"): own.tolist() for name, own in sums.items()}
    return {"examples": examples, "per": per, "values": values, "counts": counts}


HeadSums = dict[str, NDArray[np.float64]]
"""Attention's name -> a sum over the examples, or their tokens, for each head that it holds."""


def gradient_importance(
    runner: Runner,
    layers: Sequence[AttentionLayer],
    batches: Mapping[str, Sequence[Batch]],
    progress: Progress = silent,
    *,
    per: Per = "example",
    losses_of: Losses = example_losses,
) -> HeadSums:
    """Sum over examples x of |Att_h(x)^T dL(x)/dAtt_h(x)| (eq. 2), which is |dL(x)/dxi_h|, for every head h.

    The product is summed over an example's positions before its absolute value is taken; L(x) is the example's mean
    token loss. Per token the absolute value is taken at each position, as in the code that the paper's authors
    released, and the sum is over the positions of all examples. Padding adds nothing: no loss depends on it.

    Args:
        runner: runs a model in float32 or bfloat16 (float16 loses small gradients).
        layers: the attentions of its checkpoint.
        batches: name of a text, for messages -> its batches.
        per: whether the absolute value is taken for each example or each token.
        losses_of: L(x) of each example of a batch.

    Raises:
        DataError: an example's loss is not finite.
        PruneError: a gradient is not finite.
        UsageError, CheckpointError, OutputError: as `runner` does.
    """
    sums: dict[str, Tensor] = {}

    def hook(name: str, heads: int, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        context, *rest = inputs
        if not context.requires_grad:  # nothing below has heads: the graph begins here
            context = context.detach().requires_grad_()
        held = [context.detach()]

        def multiply(gradient: Tensor) -> None:
            product = held.pop().float() * gradient  # popped: freed as the backward pass goes down
            by_head = product.view(len(product), -1, heads, product.shape[-1] // heads)
            summed = by_head.sum(dim=3 if per == "token" else (1, 3))
            added = summed.abs().flatten(0, -2).sum(dim=0, dtype=torch.float64)
            sums[name] = sums[name] + added if name in sums else added

        context.register_hook(multiply)  # type: ignore[no-untyped-call]
        return (context, *rest)

    held_heads = {layer.name: layer.num_heads for layer in layers}
    with ExitStack() as hooks:
        for name, projection in output_projections(runner.model, layers).items():
            handle = projection.register_forward_pre_hook(partial(hook, name, held_heads[name]))
            hooks.callback(handle.remove)
        differentiate_losses(runner, batches, "scoring heads", progress, losses_of=losses_of)
    found: HeadSums = {}
    for name, heads in held_heads.items():
        found[name] = sums[name].cpu().numpy() if name in sums else np.zeros(heads)  # no gradient came
        if not np.isfinite(found[name]).all():
            raise PruneError(
                f"{name}: a gradient is not finite, though every loss is", "Compute with `dtype=float32`."
            )
    return found
