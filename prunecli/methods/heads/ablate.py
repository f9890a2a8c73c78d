"""Score heads by masks: the model without each head (1905.10650, 3.2), or with one head of a layer alone (3.3).

The model is loaded once. Parts that a mask does not change run once per batch: the layers below an attention and, for
attentions of the decoder, the encoder. A beam search shares the encoder alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from prunecli.evaluation.decoding import DecodingOptions, batched_search
from prunecli.evaluation.scoring import SAMPLES, SEED, make_metrics, paired_bootstrap, paired_t_test
from prunecli.methods.options import EffectMetric
from prunecli.model.axes import axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.parts import AttentionLayer
from prunecli.modules.hooks import masked_heads, recording, replaying, unchanged_below
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.progress import Progress, silent
from prunecli.results.unit_scores import Method, Reported
from prunecli.running.batches import task_batches
from prunecli.running.examples import Batch
from prunecli.running.losses import batch_vectors, example_losses, require_finite
from prunecli.text.choice import Dataset
from prunecli.text.parallel import ParallelText, pair_name

if TYPE_CHECKING:
    from prunecli.methods.scoring import ScoreOptions

TEXT_METRICS: tuple[EffectMetric, ...] = ("chrf++", "bleu")

Example = tuple[str, int]
"""What a message calls the text, and the example's number in it."""
Outcome = Any
"""Result of one example: its loss, 1 or 0 for right or wrong, a cosine, or its translation."""


@dataclass(frozen=True)
class HeadMask:
    """Some heads of one attention masked.

    Attributes:
        layer: the attention.
        values: xi_h (2.3) of each head that it holds: 0 removes it.
    """

    layer: AttentionLayer
    values: tuple[float, ...]


@dataclass(frozen=True)
class Measurement:
    """One batch, and how its outcomes are computed.

    Attributes:
        examples: the examples of the batch.
        run: returns the outcome of each example with the model as it is at the time.
        decodes: whether the decoder runs step by step, so that only the encoder can be shared.
    """

    examples: tuple[Example, ...]
    run: Callable[[], list[Outcome]]
    decodes: bool = False


def masks_of(layers: Sequence[AttentionLayer], method: Method) -> list[HeadMask]:
    """Masks for each head in turn, in the order of `layers`: without it (3.2), or with it alone in its layer (3.3)."""
    alone = method == "all-but-one"
    return [
        HeadMask(layer, tuple(float((other == head) == alone) for other in range(layer.num_heads)))
        for layer in layers
        for head in range(layer.num_heads)
    ]


def measure_masked(
    checkpoint: Checkpoint,
    model: Any,
    measurements: Sequence[Measurement],
    masks: Sequence[HeadMask],
    progress: Progress = silent,
) -> tuple[list[Example], list[list[Outcome]]]:
    """Run every measurement with the whole model and with each mask.

    Args:
        model: the model that `load_model` made of `checkpoint`.

    Returns:
        The examples, sorted, and their outcomes `[1 + masks][examples]`, first those of the whole model.
    """
    layers = checkpoint.layout.own_attentions
    whole: dict[Example, Outcome] = {}
    masked: list[dict[Example, Outcome]] = [{} for _ in masks]
    total = sum(len(measurement.examples) for measurement in measurements) * (1 + len(masks))
    with torch.inference_mode(), progress("running without heads", total, "examples") as advance:
        for measurement in measurements:
            below = unchanged_below(model, checkpoint, decoder=not measurement.decodes)
            needed = dict.fromkeys(name for mask in masks for name in below[mask.layer.name])
            with recording(model, needed) as kept:
                whole.update(zip(measurement.examples, measurement.run(), strict=True))
            advance(len(measurement.examples))
            for outcomes, mask in zip(masked, masks, strict=True):
                shared = {name: kept[name] for name in below[mask.layer.name]}
                values = {mask.layer.name: torch.tensor(mask.values)}
                with replaying(model, shared), masked_heads(model, layers, values):
                    outcomes.update(zip(measurement.examples, measurement.run(), strict=True))
                advance(len(measurement.examples))
    examples = sorted(whole)
    return examples, [[outcomes[example] for example in examples] for outcomes in (whole, *masked)]


def batch_measurements(
    model: Any,
    batches: Mapping[str, Sequence[Batch]],
    metric: EffectMetric,
    pooling: Pooling | None = None,
) -> list[Measurement]:
    """Measurements of batches by a metric that needs no search.

    Args:
        batches: name of a text, for messages -> its batches.
        metric: `loss`: each example's mean token loss; `accuracy`: 1 if the model chooses its class, else 0;
            `cosine`: cosine of a text's vector with the vector of the first run, which is of the whole model.
        pooling: pooling of the vector of a text.
    """
    whole: dict[int, torch.Tensor] = {}

    def run(batch: Batch, text: str) -> list[Outcome]:
        if metric == "accuracy":
            logits = model(**batch.arguments(model)).logits
            found = (logits.argmax(dim=-1).cpu() == batch.labels).double()
        elif pooling is not None:
            vectors = batch_vectors(model, pooling, batch)
            found = functional.cosine_similarity(vectors, whole.setdefault(id(batch), vectors))
        else:
            found = example_losses(model, batch)
            require_finite(found, batch, text)
        outcomes: list[Outcome] = found.tolist()
        return outcomes

    return [
        Measurement(tuple((text, index) for index in batch.indices), partial(run, batch, text))
        for text, of_text in batches.items()
        for batch in of_text
    ]


def translation_measurements(
    model: Any, tokenizer: Any, text: ParallelText, pair: tuple[str, str], options: DecodingOptions
) -> list[Measurement]:
    """Measurements of the translation of each sentence of `pair[0]` into `pair[1]`, by beam search.

    Raises:
        DataError: the tokenizer lacks a language.
    """
    batches, search = batched_search(model, tokenizer, text.sentences[pair[0]], pair, options)

    def run(rows: Sequence[int]) -> list[str]:
        return [line.strip() for line in tokenizer.batch_decode(search(rows), skip_special_tokens=True)]

    name = pair_name(*pair)
    return [
        Measurement(tuple((name, index) for index in rows), partial(run, rows), decodes=True)
        for rows in batches
    ]


def mean_effects(metric: str, outcomes: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Fields of `unit_scores.Effects`: means over the examples, compared by a paired t-test, two-sided.

    Args:
        outcomes: `[1 + variants][examples]`, those of the whole model first.
    """
    base, *others = np.asarray(outcomes, dtype=np.float64)
    p_values = [paired_t_test(base, scores) for scores in others]
    return _fields(metric, [float(scores.mean()) for scores in (base, *others)], p_values)


def text_effects(
    outcomes: Sequence[Sequence[str]], references: Sequence[str], samples: int = SAMPLES, seed: int = SEED
) -> list[dict[str, Any]]:
    """Fields of `unit_scores.Effects` by chrF++ and BLEU, compared by the paired bootstrap (Koehn 2004).

    Args:
        outcomes: `[1 + variants][examples]`, those of the whole model first.
        samples: resamples of the examples.
        seed: seed of the resamples.
    """
    known = make_metrics(None)
    metrics: dict[str, Any] = {metric: known[metric] for metric in TEXT_METRICS}
    tests = paired_bootstrap(outcomes, references, metrics, samples, seed) if len(outcomes) > 1 else []
    return [
        _fields(
            metric,
            [float(scorer.corpus_score(texts, [references]).score) for texts in outcomes],
            [test[metric].p_value for test in tests[1:]],
        )
        for metric, scorer in metrics.items()
    ]


def _fields(metric: str, values: list[float], p_values: Sequence[float | None]) -> dict[str, Any]:
    """The first value is that of the whole model; p is 1 if there is nothing to test with, as for a single example."""
    known = [1.0 if p_value is None else p_value for p_value in p_values]
    return {"metric": metric, "base": values[0], "values": values[1:], "p_values": known}


@dataclass(frozen=True)
class Ablation:
    """A loaded model whose heads are scored by masks.

    Attributes:
        checkpoint, model, tokenizer: the checkpoint, and what was loaded from it.
        metric: the metric of the model with and without heads.
        options: method, batch size, search and significance test.
    """

    checkpoint: Checkpoint
    model: Any
    tokenizer: Any
    metric: EffectMetric
    options: ScoreOptions
    progress: Progress = silent

    def scores(self, data: Dataset, selected: Dataset | None) -> dict[str, Any]:
        """Fields of `Scores`. After chrF++ or BLEU the other one is in `also`: it costs no further search.

        Sentences of all pairs count as one corpus.

        Args:
            selected: text that the best heads are chosen on, if `data` only reports them.
        """
        layers = self.checkpoint.layout.own_attentions
        examples, effects = self._effects(selected or data, masks_of(layers, self.options.metric))
        for found in effects:
            found |= {name: _by_axis(layers, found[name]) for name in ("values", "p_values")}
        fields: dict[str, Any] = {"examples": examples, **effects[0], "also": effects[1:]}
        if self.options.metric == "all-but-one":
            fields["best"] = best_heads(layers, fields["values"], lower=self.metric == "loss")
            if selected is not None:
                fields["reported"] = self._report(data, fields["best"])
        return fields

    def _report(self, data: Dataset, best: Mapping[str, int]) -> Reported:
        """The score on `data` of each layer's single head that was chosen on other text (3.3, appendix A)."""
        masks = [
            HeadMask(layer, tuple(float(head == best[name]) for head in layer.heads))
            for layer in self.checkpoint.layout.own_attentions
            if (name := axis_name(layer.name, "head")) in best
        ]
        examples, (found, *_) = self._effects(data, masks)
        only, p_value = (dict(zip(best, found[name], strict=True)) for name in ("values", "p_values"))
        return Reported(metric=self.metric, examples=examples, base=found["base"], only=only, p_value=p_value)

    def _effects(self, data: Dataset, masks: Sequence[HeadMask]) -> tuple[int, list[dict[str, Any]]]:
        """Number of examples, and the effects by metric, first by `metric`."""
        measurements = self.measurements(data)
        examples, outcomes = measure_masked(self.checkpoint, self.model, measurements, masks, self.progress)
        if self.metric not in TEXT_METRICS:
            return len(examples), [mean_effects(self.metric, outcomes)]
        assert isinstance(data.text, ParallelText)
        lines = {pair_name(*pair): data.text.sentences[pair[1]] for pair in data.pairs}
        references = [lines[name][index] for name, index in examples]
        with self.progress("testing significance", None, "resamples"):
            effects = text_effects(outcomes, references, self.options.samples, self.options.seed)
        return len(examples), sorted(effects, key=lambda own: own["metric"] != self.metric)

    def measurements(self, data: Dataset) -> list[Measurement]:
        """Measurements of each batch of `data`.

        Raises:
            PruneError: text or model that cannot be used.
        """
        model, tokenizer, text = self.model, self.tokenizer, data.text
        if self.metric in TEXT_METRICS and isinstance(text, ParallelText):
            return [
                measurement
                for pair in data.pairs
                for measurement in translation_measurements(
                    model, tokenizer, text, pair, self.options.decoding
                )
            ]
        pooling = read_pooling(self.checkpoint.path) if data.task == "embedding" else None
        batches = task_batches(tokenizer, model, data, self.options.batch_tokens, pooling)
        return batch_measurements(model, batches, self.metric, pooling)


def best_heads(
    layers: Sequence[AttentionLayer], values: Mapping[str, Sequence[float]], *, lower: bool = False
) -> dict[str, int]:
    """all-but-one: name of an axis -> original id of its best single head (3.3), the first of equal ones.

    Args:
        values: name of an axis -> `[heads]`.
        lower: whether lower values are better.
    """
    pick = np.argmin if lower else np.argmax
    names = {axis_name(layer.name, "head"): layer for layer in layers if layer.num_heads}
    return {name: layer.heads[int(pick(values[name]))] for name, layer in names.items()}


def _by_axis(layers: Sequence[AttentionLayer], values: Sequence[float]) -> dict[str, list[float]]:
    """Name of an axis -> `[heads]` of `values`, which are of all heads in the order of `layers`."""
    left = iter(values)
    return {axis_name(layer.name, "head"): [*islice(left, layer.num_heads)] for layer in layers}
