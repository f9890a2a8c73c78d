"""Measure: text in, `HeadScores` out, by any of the three methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import UsageError
from prunecli.evaluation.decoding import DecodingOptions
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
from prunecli.methods.heads.names import EffectMetric
from prunecli.methods.heads.score import gradient_importance
from prunecli.model.attention import AttentionLayer
from prunecli.model.checkpoint import Checkpoint
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.progress import Progress, silent
from prunecli.results.heads import HeadScores, Method, Per, ReportedHeads
from prunecli.running.batches import task_batches
from prunecli.running.examples import Batch
from prunecli.running.losses import example_losses
from prunecli.running.runner import Runner
from prunecli.running.vectors import random_projections
from prunecli.text.choice import Dataset
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.tasks import TaskName

METRICS_OF: dict[TaskName, tuple[EffectMetric, ...]] = {
    "translation": ("chrf++", "bleu", "loss"),
    "classification": ("accuracy", "loss"),
    "mlm": ("loss",),
    "lm": ("loss",),
    "embedding": ("cosine",),
}
"""What ablation can measure at each task; the first is the default."""


@dataclass(frozen=True)
class AblationOptions:
    """How `ablation` and `all-but-one` measure.

    Attributes:
        metric: one of `METRICS_OF` the task.
        decoding: of the beam search that chrF++ and BLEU need; its `batch_tokens` hold for every metric.
        samples: resamples of the bootstrap test.
        seed: of the resamples.
    """

    metric: EffectMetric
    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    samples: int = 1000
    seed: int = 12345


@dataclass(frozen=True)
class LoadedModel:
    """An open checkpoint, its running model and its tokenizer."""

    checkpoint: Checkpoint
    model: Any
    tokenizer: Any


def check_metric(task: TaskName, metric: str | None) -> EffectMetric:
    """`metric`, or the task's default.

    Raises:
        UsageError: the task has no such metric.
    """
    known = METRICS_OF[task]
    for name in known:
        if metric in (None, name):
            return name
    raise UsageError(f"--metric {metric}: not one of {task}", f"Choose from {', '.join(known)}.")


def score_by_gradient(
    runner: Runner,
    checkpoint: Checkpoint,
    tokenizer: Any,
    data: Dataset,
    batch_tokens: int,
    progress: Progress = silent,
    *,
    per: Per = "example",
) -> HeadScores:
    """Importance of every head (4.1), summed over the examples of `data`, or over their tokens.

    Of `embedding` L(x) is `random_projections`, else the loss of the task.

    Args:
        runner: of `checkpoint`.
        per: what the absolute value is taken of.

    Raises:
        PruneError: text, model, memory or losses that cannot be used.
    """
    layers = checkpoint.layout.own_attentions
    pooling = _pooling(checkpoint, data)
    losses_of = example_losses if pooling is None else partial(random_projections, pooling)
    batches = task_batches(tokenizer, runner.model, data, batch_tokens, pooling)
    sums = gradient_importance(runner, layers, batches, progress, per=per, losses_of=losses_of)
    run = [batch for of_text in batches.values() for batch in of_text]
    count = sum(len(batch.indices) for batch in run)
    tokens = _tokens(layers, run) if per == "token" else {}
    return _scores(checkpoint, data.task, "gradient", layers, count, sums, per=per, tokens=tokens)


def _pooling(checkpoint: Checkpoint, data: Dataset) -> Pooling | None:
    """The checkpoint's, where vectors of texts are measured."""
    return read_pooling(checkpoint.path) if data.task == "embedding" else None


def _tokens(layers: Sequence[AttentionLayer], batches: Sequence[Batch]) -> dict[str, int]:
    """Attention's name -> real tokens of all batches that it attends from: the source's, or the decoder's."""

    def count(side: str) -> int:
        return sum(int(batch.inputs.get(side, batch.inputs["attention_mask"]).sum()) for batch in batches)

    source, target = count("attention_mask"), count("decoder_attention_mask")
    return {layer.name: source if layer.kind == "encoder" else target for layer in layers}


def score_by_ablation(
    loaded: LoadedModel,
    data: Dataset,
    method: Method,
    options: AblationOptions,
    progress: Progress = silent,
) -> dict[EffectMetric, HeadScores]:
    """The score without each head (3.2), or with each head alone in its layer (3.3: `all-but-one`).

    Sentences of all pairs count as one corpus.

    Returns:
        Metric -> scores: `options.metric` first; after chrF++ or BLEU also the other, which costs no further search.

    Raises:
        PruneError: text, model or options that cannot be used.
    """
    layers = loaded.checkpoint.layout.own_attentions
    count, effects = _effects(loaded, data, masks_of(layers, method), options, progress)
    return {
        metric: _scores(
            loaded.checkpoint,
            data.task,
            method,
            layers,
            count,
            _by_layer(layers, effects[metric].values),
            metric=metric,
            base=effects[metric].base,
            p_values=_by_layer(layers, effects[metric].p_values),
        )
        for metric in sorted(effects, key=lambda name: name != options.metric)
    }


def report_best(
    loaded: LoadedModel,
    data: Dataset,
    best: dict[str, int],
    options: AblationOptions,
    progress: Progress = silent,
) -> ReportedHeads:
    """The score on `data` of each layer's single head that was chosen on other text (3.3, appendix A).

    Args:
        best: attention's name -> original id of the head.
    """
    layers = [layer for layer in loaded.checkpoint.layout.own_attentions if layer.name in best]
    masks = [
        HeadMask(layer, tuple(float(head == best[layer.name]) for head in layer.heads)) for layer in layers
    ]
    count, by_metric = _effects(loaded, data, masks, options, progress)
    effects = by_metric[options.metric]
    names = [layer.name for layer in layers]
    return ReportedHeads(
        metric=options.metric,
        examples=count,
        base=effects.base,
        only=dict(zip(names, effects.values, strict=True)),
        p_value=dict(zip(names, effects.p_values, strict=True)),
    )


def _by_layer(layers: Sequence[AttentionLayer], values: Sequence[float]) -> dict[str, NDArray[np.float64]]:
    """Attention's name -> `[heads]` of `values`, which are of all heads in the order of `layers`."""
    remaining = iter(values)
    return {
        layer.name: np.array(list(islice(remaining, layer.num_heads)), dtype=np.float64) for layer in layers
    }


def _scores(
    checkpoint: Checkpoint,
    task: TaskName,
    method: Method,
    layers: Sequence[AttentionLayer],
    count: int,
    values: Any,
    **more: Any,
) -> HeadScores:
    return HeadScores(
        method=method,
        fingerprint=checkpoint.fingerprint,
        model_type=checkpoint.require_architecture().model_type,
        task=task,
        examples=count,
        heads={layer.name: layer.heads for layer in layers},
        values=values,
        **more,
    )


def _effects(
    loaded: LoadedModel,
    data: Dataset,
    masks: Sequence[HeadMask],
    options: AblationOptions,
    progress: Progress,
) -> tuple[int, dict[EffectMetric, Effects]]:
    """How many examples there are, and the effects by metric."""
    examples, outcomes = measure_masked(
        loaded.checkpoint, loaded.model, measurements(loaded, data, options), masks, progress
    )
    if options.metric not in TEXT_METRICS:
        return len(examples), {options.metric: mean_effects(options.metric, outcomes)}
    assert isinstance(data.text, ParallelText)
    lines = {pair_name(*pair): data.text.sentences[pair[1]] for pair in data.pairs}
    references = [lines[name][index] for name, index in examples]
    with progress("testing significance", None, "resamples"):
        return len(examples), text_effects(outcomes, references, options.samples, options.seed)


def measurements(loaded: LoadedModel, data: Dataset, options: AblationOptions) -> list[Measurement]:
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
    batches = task_batches(tokenizer, model, data, options.decoding.batch_tokens, pooling)
    if pooling is not None:
        return cosine_measurements(model, batches, pooling)
    return (accuracy_measurements if options.metric == "accuracy" else loss_measurements)(model, batches)
