"""Score the heads of a checkpoint on text within given resources, by any of the three methods (1905.10650)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prunecli.choices import Choices
from prunecli.errors import UsageError
from prunecli.evaluation.decoding import DecodingOptions
from prunecli.evaluation.options import labels_for
from prunecli.methods.heads.ablate import (
    HeadMask,
    Measurement,
    accuracy_measurements,
    cosine_measurements,
    loss_measurements,
    masks_of,
    measure_masked,
    translation_measurements,
)
from prunecli.methods.heads.effects import TEXT_METRICS, Effects, mean_effects, text_effects
from prunecli.methods.heads.score import gradient_importance
from prunecli.methods.names import EffectMetric
from prunecli.model.attention import AttentionLayer
from prunecli.model.axes import axis_name
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.modules.devices import Devices, choose_devices
from prunecli.modules.fitting import decoding, decoding_room, fitting_dtype, nothing
from prunecli.modules.loading import load_model
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.modules.precision import candidates, dtype_name
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.unit_scores import Method, Per, Reported, Scores, scores_of
from prunecli.running.batches import task_batches
from prunecli.running.layerwise.runner import Layerwise, Resources, RunReport
from prunecli.running.losses import example_losses
from prunecli.running.runner import InMemory, Runner
from prunecli.running.vectors import random_projections
from prunecli.tensors.documents import refuse_unwritable, write_json
from prunecli.text.choice import Dataset, TextChoice
from prunecli.text.parallel import ParallelText, pair_name
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
"""What ablation can measure at each task; the first is the default."""


@dataclass(frozen=True)
class ScoreOptions(Choices):
    """How heads are scored.

    Attributes:
        method: `gradient` (4.1): one forward and backward pass; `ablation` (3.2): the score without each head;
            `all-but-one` (3.3): with each head alone in its layer.
        per: what `gradient` takes the absolute value of; None: each example's sum, as eq. 2 says.
        metric: the score of the other two; None: chrF++, accuracy, cosine or loss, by task.
        beam: of the search that chrF++ and BLEU need.
        batch_tokens: padded tokens in a batch.
        samples: resamples of the significance test of chrF++ and BLEU.
        seed: of the resamples.
        select_data, select_split: text that `all-but-one` chooses the best heads on, where it reports them on another.
        device, dtype: as in `load_model`.
        memory: bytes within which `gradient` runs the model layer by layer; None: it is held whole.
        spill_directory: for what finds no room in it; None: the one for temporary files.
    """

    method: Method = "gradient"
    per: Per | None = None
    metric: EffectMetric | None = None
    beam: int = 4
    batch_tokens: int = 4096
    samples: int = 1000
    seed: int = 12345
    select_data: Path | None = None
    select_split: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    memory: int | None = None
    spill_directory: Path | None = None

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            UsageError: options of another method.
        """
        is_gradient = self.method == "gradient"
        selects = self.select_data is not None or self.select_split is not None
        for refused, message, remedy in (
            (
                is_gradient and self.dtype == "float16",
                "--dtype float16: small gradients vanish in it",
                "Choose bfloat16 or float32 for --method gradient.",
            ),
            (
                not is_gradient and self.memory is not None,
                f"--memory goes with --method gradient: {self.method} runs parts of the model again and again",
                "Leave out --memory on a machine that holds the model, or choose --method gradient.",
            ),
            (
                not is_gradient and self.per is not None,
                f"--importance goes with --method gradient: {self.method} takes no gradients",
                "Leave out --importance, or choose --method gradient.",
            ),
            (
                is_gradient and self.metric is not None,
                "--metric goes with --method ablation or all-but-one: the gradient is that of the loss",
                "Leave out --metric, or choose another --method.",
            ),
            (
                self.method != "all-but-one" and selects,
                "--select-data and --select-split go with --method all-but-one",
                "Leave them out, or choose it.",
            ),
        ):
            if refused:
                raise UsageError(message, remedy)

    @property
    def decoding(self) -> DecodingOptions:
        """Of the beam search."""
        return DecodingOptions(self.beam, self.batch_tokens)


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
    """What the model loses without each of its attention heads (1905.10650, 3 and 4.1).

    Args:
        model: an open model, a directory or a name of the hub.
        choice: of the text.
        output: file that the scores are written to; None: none.
        task: None: what the model is for.
        force: replace `output`.
        say: hears what is chosen by itself, and why.
        report: called with what a run layer by layer took.

    Raises:
        PruneError: a model, text, option or output that cannot be used.
    """
    options = options or ScoreOptions()
    options.check()
    if output is not None:
        refuse_unwritable(Path(output), force=force)
    checkpoint = model if isinstance(model, Checkpoint) else open_model(model)
    _ = checkpoint.layout.attentions  # a family that is not declared is refused before anything heavy
    task = task or task_of(checkpoint)
    choice.check(task)
    data = choice.read(task, say)
    selecting = choice.selecting(task, options.select_data, options.select_split)
    selected = None if selecting is None else selecting.read(task, say)
    options = replace(options, metric=chosen_metric(task, options.metric))
    devices = choose_devices(options.device)
    dtype = _dtype(checkpoint, options, devices, say)
    tokenizer = load_tokenizer(checkpoint.path)
    fields: dict[str, Any]
    if options.method == "gradient":
        run = RunReport()
        runner: Runner
        if options.memory is not None:
            resources = Resources(devices.first, dtype, options.memory, options.spill_directory)
            runner = Layerwise(checkpoint, resources, run)
        else:
            runner = InMemory(load_model(checkpoint.path, device=devices, dtype=dtype))
        fields = _by_gradient(runner, checkpoint, tokenizer, data, options, progress)
        if options.memory is not None:
            report(run)
    else:
        room = decoding_room(checkpoint, options.decoding.load, dtype)
        held = load_model(checkpoint.path, device=devices, dtype=dtype, room=room)
        fields = _by_ablation(LoadedModel(checkpoint, held, tokenizer), data, selected, options, progress)
    scores = scores_of(
        checkpoint,
        None if options.method == "gradient" else options.seed,
        kind="head",
        method=options.method,
        task=task,
        texts=choice.texts,
        split=choice.split_read,
        whole_files=data.text.whole_files if isinstance(data.text, PlainText) else None,
        dtype=dtype_name(dtype),
        ids={axis_name(layer.name, "head"): layer.heads for layer in checkpoint.layout.own_attentions},
        **fields,
    )
    if output is not None:
        write_json(Path(output), scores.to_json(), force=force)
    return scores


@dataclass(frozen=True)
class LoadedModel:
    """An open checkpoint, its running model and its tokenizer."""

    checkpoint: Checkpoint
    model: Any
    tokenizer: Any


def chosen_metric(task: TaskName, metric: str | None) -> EffectMetric:
    """`metric`, or the task's default.

    Raises:
        UsageError: the task has no such metric.
    """
    known = METRICS_OF[task]
    for name in known:
        if metric in (None, name):
            return name
    raise UsageError(f"--metric {metric}: not one of {task}", f"Choose from {', '.join(known)}.")


def _by_gradient(
    runner: Runner,
    checkpoint: Checkpoint,
    tokenizer: Any,
    data: Dataset,
    options: ScoreOptions,
    progress: Progress,
) -> dict[str, Any]:
    """Fields of `Scores`: importance of every head (4.1), summed over the examples of `data`, or over their tokens.

    L(x) is the loss of the task; of `embedding` it is `random_projections`.
    """
    layers = checkpoint.layout.own_attentions
    pooling = _pooling(checkpoint, data)
    losses_of = example_losses if pooling is None else partial(random_projections, pooling)
    by_text = task_batches(tokenizer, runner.model, data, options.batch_tokens, pooling)
    per = options.per or "example"
    sums = gradient_importance(runner, layers, by_text, progress, per=per, losses_of=losses_of)
    batches = [batch for of_text in by_text.values() for batch in of_text]
    examples = sum(len(batch.indices) for batch in batches)

    def tokens(side: str) -> int:
        return sum(int(batch.inputs.get(side, batch.inputs["attention_mask"]).sum()) for batch in batches)

    source, target = tokens("attention_mask"), tokens("decoder_attention_mask")
    counts = {
        axis_name(layer.name, "head"): examples
        if per == "example"
        else source
        if layer.kind == "encoder"
        else target
        for layer in layers
    }
    values = {axis_name(name, "head"): own.tolist() for name, own in sums.items()}
    return {"examples": examples, "per": per, "values": values, "counts": counts}


def _pooling(checkpoint: Checkpoint, data: Dataset) -> Pooling | None:
    """The checkpoint's, where vectors of texts are measured."""
    return read_pooling(checkpoint.path) if data.task == "embedding" else None


def _by_ablation(
    loaded: LoadedModel,
    data: Dataset,
    selected: Dataset | None,
    options: ScoreOptions,
    progress: Progress,
) -> dict[str, Any]:
    """Fields of `Scores`: the metric without each head (3.2), or with each head alone in its layer (3.3).

    Sentences of all pairs count as one corpus. After chrF++ or BLEU the other is in `also`: it costs no further search.

    Args:
        selected: text that the best heads are chosen on, where `data` only reports them.
    """
    layers = loaded.checkpoint.layout.own_attentions
    examples, effects = _effects(
        loaded, selected or data, masks_of(layers, options.method), options, progress
    )
    by_metric = [
        {
            "metric": metric,
            "base": effects[metric].base,
            "values": _by_layer(layers, effects[metric].values),
            "p_values": _by_layer(layers, effects[metric].p_values),
        }
        for metric in sorted(effects, key=lambda name: name != options.metric)
    ]
    fields: dict[str, Any] = {"examples": examples, **by_metric[0], "also": by_metric[1:]}
    if options.method == "all-but-one":
        best = best_heads(layers, fields["values"], lower=options.metric == "loss")
        fields["best"] = {axis_name(name, "head"): head for name, head in best.items()}
        if selected is not None:
            fields["reported"] = _report_best(loaded, data, best, options, progress)
    return fields


def best_heads(
    layers: Sequence[AttentionLayer], values: Mapping[str, Sequence[float]], *, lower: bool = False
) -> dict[str, int]:
    """all-but-one: attention's name -> original id of its best single head (3.3), the first of equal ones.

    Args:
        values: name of an axis -> `[heads]`.
        lower: whether lower values are better.
    """
    pick = np.argmin if lower else np.argmax
    return {
        layer.name: layer.heads[int(pick(values[axis_name(layer.name, "head")]))]
        for layer in layers
        if layer.num_heads
    }


def _report_best(
    loaded: LoadedModel, data: Dataset, best: Mapping[str, int], options: ScoreOptions, progress: Progress
) -> Reported:
    """The score on `data` of each layer's single head that was chosen on other text (3.3, appendix A)."""
    layers = [layer for layer in loaded.checkpoint.layout.own_attentions if layer.name in best]
    masks = [
        HeadMask(layer, tuple(float(head == best[layer.name]) for head in layer.heads)) for layer in layers
    ]
    examples, by_metric = _effects(loaded, data, masks, options, progress)
    effects = by_metric[_metric(options)]
    names = [axis_name(layer.name, "head") for layer in layers]
    return Reported(
        metric=effects.metric,
        examples=examples,
        base=effects.base,
        only=dict(zip(names, effects.values, strict=True)),
        p_value=dict(zip(names, effects.p_values, strict=True)),
    )


def _by_layer(layers: Sequence[AttentionLayer], values: Sequence[float]) -> dict[str, list[float]]:
    """Name of an axis -> `[heads]` of `values`, which are of all heads in the order of `layers`."""
    left = iter(values)
    return {axis_name(layer.name, "head"): [*islice(left, layer.num_heads)] for layer in layers}


def _metric(options: ScoreOptions) -> EffectMetric:
    assert options.metric is not None  # score_heads has chosen one
    return options.metric


def _effects(
    loaded: LoadedModel, data: Dataset, masks: Sequence[HeadMask], options: ScoreOptions, progress: Progress
) -> tuple[int, dict[EffectMetric, Effects]]:
    """Number of examples, and the effects by metric."""
    examples, outcomes = measure_masked(
        loaded.checkpoint, loaded.model, measurements(loaded, data, options), masks, progress
    )
    metric = _metric(options)
    if metric not in TEXT_METRICS:
        return len(examples), {metric: mean_effects(metric, outcomes)}
    assert isinstance(data.text, ParallelText)
    lines = {pair_name(*pair): data.text.sentences[pair[1]] for pair in data.pairs}
    references = [lines[name][index] for name, index in examples]
    with progress("testing significance", None, "resamples"):
        return len(examples), text_effects(outcomes, references, options.samples, options.seed)


def measurements(loaded: LoadedModel, data: Dataset, options: ScoreOptions) -> list[Measurement]:
    """What is measured of each batch of `data`.

    Raises:
        PruneError: text or model that cannot be used.
    """
    model, tokenizer, text = loaded.model, loaded.tokenizer, data.text
    if options.metric in TEXT_METRICS and isinstance(text, ParallelText):
        return [
            measurement
            for pair in data.pairs
            for measurement in translation_measurements(model, tokenizer, text, pair, options.decoding)
        ]
    pooling = _pooling(loaded.checkpoint, data)
    batches = task_batches(tokenizer, model, data, options.batch_tokens, pooling)
    if pooling is not None:
        return cosine_measurements(model, batches, pooling)
    return (accuracy_measurements if options.metric == "accuracy" else loss_measurements)(model, batches)


def _dtype(checkpoint: Checkpoint, options: ScoreOptions, devices: Devices, say: Say) -> torch.dtype:
    gradients = options.method == "gradient"
    if options.memory is not None:
        return candidates(options.dtype, [checkpoint], devices.first, gradients=gradients)[0]
    return fitting_dtype(
        dict.fromkeys(labels_for([checkpoint.path]), checkpoint),
        devices,
        options.dtype,
        beside=nothing if gradients else decoding(options.decoding.load),
        gradients=gradients,
        by_layer="--memory" if gradients else "",
        say=say,
    )
