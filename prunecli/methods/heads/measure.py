"""Measure: text in, `HeadScores` out, by any of the three methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prunecli.errors import UsageError
from prunecli.evaluation.decoding import DecodingOptions
from prunecli.methods.heads.ablate import (
    Piece,
    Variant,
    accuracy_pieces,
    loss_pieces,
    only_each,
    outcomes,
    translation_pieces,
    without_each,
)
from prunecli.methods.heads.effects import TEXT_METRICS, Effects, Metric, mean_effects, text_effects
from prunecli.methods.heads.score import HeadSums, gradient_importance
from prunecli.model.attention import AttentionLayer
from prunecli.model.checkpoint import Checkpoint
from prunecli.progress import Progress, silent
from prunecli.results.heads import HeadScores, Method, Per, ReportedHeads
from prunecli.running.encoding import labelled_examples, padding_id, require_task, translation_examples
from prunecli.running.examples import Batch, Examples
from prunecli.running.masking import mlm_examples
from prunecli.running.windows import lm_windows, window_examples
from prunecli.text.choice import Dataset
from prunecli.text.labelled import LabelledText
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.tasks import TaskName

METRICS_OF: dict[TaskName, tuple[Metric, ...]] = {
    "translation": ("chrf++", "bleu", "loss"),
    "classification": ("accuracy", "loss"),
    "mlm": ("loss",),
    "lm": ("loss",),
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

    metric: Metric
    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    samples: int = 1000
    seed: int = 12345


@dataclass(frozen=True)
class Subject:
    """An open checkpoint, its running model and its tokenizer."""

    checkpoint: Checkpoint
    model: Any
    tokenizer: Any


def check_metric(task: TaskName, metric: str | None) -> Metric:
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
    subject: Subject,
    data: Dataset,
    batch_tokens: int,
    progress: Progress = silent,
    *,
    per: Per = "example",
    importance: Callable[..., HeadSums] = gradient_importance,
) -> HeadScores:
    """Importance of every head (4.1), summed over the examples of `data`, or over their tokens.

    Args:
        per: what the absolute value is taken of.
        importance: `gradient_importance`, or a `GradientByLayer` whose session's skeleton is the model.

    Raises:
        PruneError: text, model or losses that cannot be used.
    """
    layers = subject.checkpoint.layout.attentions
    batches = _batches(subject, data, batch_tokens)
    sums = importance(subject.model, layers, batches, progress, per=per)
    run = [batch for found in batches.values() for batch in found]
    count = sum(len(batch.indices) for batch in run)
    tokens = _tokens(layers, run) if per == "token" else {}
    return _scores(subject, data.task, "gradient", layers, count, sums, per=per, tokens=tokens)


def _tokens(layers: Sequence[AttentionLayer], batches: Sequence[Batch]) -> dict[str, int]:
    """Attention's name -> real tokens of all batches that it attends from: the source's, or the decoder's."""

    def count(side: str) -> int:
        return sum(int(batch.inputs.get(side, batch.inputs["attention_mask"]).sum()) for batch in batches)

    source, target = count("attention_mask"), count("decoder_attention_mask")
    return {layer.name: source if layer.kind == "encoder" else target for layer in layers}


def score_by_ablation(
    subject: Subject,
    data: Dataset,
    method: Method,
    options: AblationOptions,
    progress: Progress = silent,
) -> dict[Metric, HeadScores]:
    """The score without each head (3.2), or with each head alone in its layer (3.3: `all-but-one`).

    Sentences of all pairs count as one corpus.

    Returns:
        Metric -> scores: `options.metric` first; after chrF++ or BLEU also the other, which costs no further search.

    Raises:
        PruneError: text, model or options that cannot be used.
    """
    layers = subject.checkpoint.layout.attentions
    variants = (without_each if method == "ablation" else only_each)(layers)
    count, found = _effects(subject, data, variants, options, progress)
    made = {}
    for metric in sorted(found, key=lambda name: name != options.metric):
        effects = found[metric]
        by_layer = {
            layer.name: np.array(_of(layer, variants, effects.values), dtype=np.float64) for layer in layers
        }
        p_values = {
            layer.name: np.array(_of(layer, variants, effects.p_values), dtype=np.float64) for layer in layers
        }
        made[metric] = _scores(
            subject,
            data.task,
            method,
            layers,
            count,
            by_layer,
            metric=metric,
            base=effects.base,
            p_values=p_values,
        )
    return made


def report_best(
    subject: Subject,
    data: Dataset,
    best: dict[str, int],
    options: AblationOptions,
    progress: Progress = silent,
) -> ReportedHeads:
    """The score on `data` of each layer's single head that was chosen on other text (3.3, appendix A).

    Args:
        best: attention's name -> original id of the head.
    """
    layers = [layer for layer in subject.checkpoint.layout.attentions if layer.name in best]
    variants = [
        Variant(layer, tuple(float(head == best[layer.name]) for head in layer.heads)) for layer in layers
    ]
    count, found = _effects(subject, data, variants, options, progress)
    effects = found[options.metric]
    names = [layer.name for layer in layers]
    return ReportedHeads(
        metric=options.metric,
        examples=count,
        base=effects.base,
        only=dict(zip(names, effects.values, strict=True)),
        p_value=dict(zip(names, effects.p_values, strict=True)),
    )


def _of(layer: AttentionLayer, variants: Sequence[Variant], values: Sequence[float]) -> list[float]:
    return [value for variant, value in zip(variants, values, strict=True) if variant.layer is layer]


def _scores(
    subject: Subject,
    task: TaskName,
    method: Method,
    layers: Sequence[AttentionLayer],
    count: int,
    values: Any,
    **more: Any,
) -> HeadScores:
    return HeadScores(
        method=method,
        fingerprint=subject.checkpoint.fingerprint,
        model_type=subject.checkpoint.require_architecture().model_type,
        task=task,
        examples=count,
        heads={layer.name: layer.heads for layer in layers},
        values=values,
        **more,
    )


def _effects(
    subject: Subject,
    data: Dataset,
    variants: Sequence[Variant],
    options: AblationOptions,
    progress: Progress,
) -> tuple[int, dict[Metric, Effects]]:
    """How many examples there are, and the effects by metric."""
    pieces = _pieces(subject, data, options)
    examples, found = outcomes(subject.checkpoint, subject.model, pieces, variants, progress)
    if options.metric not in TEXT_METRICS:
        return len(examples), {options.metric: mean_effects(options.metric, found)}
    assert isinstance(data.text, ParallelText)
    lines = {pair_name(*pair): data.text.sentences[pair[1]] for pair in data.pairs}
    references = [lines[name][index] for name, index in examples]
    with progress("testing significance", None, "resamples"):
        return len(examples), text_effects(found, references, options.samples, options.seed)


def _pieces(subject: Subject, data: Dataset, options: AblationOptions) -> list[Piece]:
    model, tokenizer, text = subject.model, subject.tokenizer, data.text
    if options.metric in TEXT_METRICS and isinstance(text, ParallelText):
        return [
            piece
            for pair in data.pairs
            for piece in translation_pieces(model, tokenizer, text, pair, options.decoding)
        ]
    batches = _batches(subject, data, options.decoding.batch_tokens)
    if options.metric == "accuracy":
        return accuracy_pieces(model, batches)
    return loss_pieces(model, batches)


def _batches(subject: Subject, data: Dataset, batch_tokens: int) -> dict[str, list[Batch]]:
    """What a message calls a text -> its batches."""
    model, tokenizer, text = subject.model, subject.tokenizer, data.text
    require_task(model, data.task)
    examples: dict[str, Examples]
    if isinstance(text, ParallelText):
        examples = {
            pair_name(*pair): translation_examples(tokenizer, model, text, [pair]) for pair in data.pairs
        }
    elif isinstance(text, LabelledText):
        examples = {str(text.path): labelled_examples(tokenizer, model, text)}
    else:
        name = ", ".join(map(str, text.files))
        if data.task == "mlm":
            examples = {name: mlm_examples(tokenizer, model, text.texts, context=data.context)}
        else:
            windows = lm_windows(tokenizer, model, text.texts, context=data.context)
            examples = {name: window_examples(windows, padding_id(model, tokenizer))}
    return {name: made.batches(batch_tokens) for name, made in examples.items()}
