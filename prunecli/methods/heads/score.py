"""Score the heads of a checkpoint on text, by gradients (1905.10650, 4.1) or by masks (3.2, 3.3)."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from prunecli.errors import UsageError
from prunecli.evaluation.decoding import DecodingOptions, batched_search
from prunecli.evaluation.on_text import runner_of, text_fields
from prunecli.evaluation.scoring import make_metrics, paired_bootstrap, paired_t_test
from prunecli.methods.measuring import gradient_scores
from prunecli.methods.options import EffectMetric
from prunecli.methods.scoring import ScoreOptions
from prunecli.model.axes import axis_name
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.find_axes import axes_of
from prunecli.model.parts import AttentionLayer
from prunecli.modules.fitting import dtype_name
from prunecli.modules.hooks import masked_heads, recording, replaying, unchanged_below
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.unit_scores import Method, Reported, Scores, scores_of
from prunecli.running.batches import batch_vectors, example_losses, require_finite, task_batches
from prunecli.running.examples import Batch
from prunecli.tensors.transaction import refuse_unwritable
from prunecli.text.choice import Dataset, TaskName, TextChoice, task_of
from prunecli.text.parallel import ParallelText, pair_name
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
) -> Scores:
    """Score each attention head by what the model loses without it (1905.10650, 3 and 4.1).

    Args:
        model: an open model, a directory or a name of the hub.
        choice: the text.
        output: file that the scores are written to, if any.
        task: task of the text. If None, the task of the model.
        force: replace `output`.
        say: called with lines about choices made by default, and about a run layer by layer.

    Raises:
        PruneError: a model, text, option or output that cannot be used.
    """
    options = options or ScoreOptions()
    options.check_options()
    if output is not None:
        refuse_unwritable(Path(output), force=force)
    checkpoint = model if isinstance(model, Checkpoint) else open_model(model)
    axes = axes_of(checkpoint, "head")  # a family without heads is refused before anything heavy
    task = task or task_of(checkpoint)
    choice.check_task(task)
    data = choice.read(task, say)
    selecting = choice.selecting(task, options.select_data, options.select_split)
    selected = None if selecting is None else selecting.read(task, say)
    metric = chosen_metric(task, options.measure)
    is_gradient = options.metric == "gradient"
    runner, dtype = runner_of(
        checkpoint,
        options,
        say,
        dtype=options.dtype,
        load=None if is_gradient else options.decoding.load,
        gradients=is_gradient,
        by_layer="--memory" if is_gradient else "",
    )
    if is_gradient:
        per = options.per or "example"
        (scores,) = gradient_scores(
            checkpoint, runner, data, {"head": axes}, options.batch_tokens, per, progress
        ).values()
    else:
        found = ablation_fields(checkpoint, runner.model, metric, options, data, selected, progress)
        ids = {axis.name: axis.ids for axis in axes}
        scores = scores_of(checkpoint, options.seed, kind="head", method=options.metric, ids=ids, **found)
    scores = scores.model_copy(update={"dtype": dtype_name(dtype), **text_fields(data, choice)})
    if runner.report is not None:
        say(runner.report.line(back=True))
    if output is not None:
        scores.write(Path(output), force=force)
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


TEXT_METRICS: tuple[EffectMetric, ...] = ("chrf++", "bleu")

Example = tuple[str, int]
"""What a message calls the text, and the example's number in it."""
Outcome = Any
"""Result of one example: its loss, 1 or 0 for right or wrong, a cosine, or its translation."""


HeadMask = tuple[str, tuple[float, ...]]
"""Name of an attention, and xi_h (2.3) of each head that it holds: 0 removes it."""


Measurement = tuple[tuple[Example, ...], Callable[[], list[Outcome]]]
"""The examples of a batch; and what returns the outcome of each with the model as it is at the time."""


def masks_of(layers: Sequence[AttentionLayer], method: Method) -> list[HeadMask]:
    """Masks for each head in turn, in the order of `layers`: without it (3.2), or with it alone in its layer (3.3)."""
    alone = method == "all-but-one"
    return [
        (layer.name, tuple(float((other == head) == alone) for other in range(layer.count)))
        for layer in layers
        for head in range(layer.count)
    ]


def measure_masked(
    checkpoint: Checkpoint,
    model: Any,
    measurements: Sequence[Measurement],
    masks: Sequence[HeadMask],
    progress: Progress = silent,
    *,
    decodes: bool = False,
) -> tuple[list[Example], list[list[Outcome]]]:
    """Run every measurement with the whole model and with each mask.

    Args:
        model: the model that `load_model` made of `checkpoint`.
        decodes: whether the decoder runs step by step, so that only the encoder can be shared.

    Returns:
        The examples, sorted, and their outcomes `[1 + masks][examples]`, first those of the whole model.
    """
    layers = checkpoint.layout.own_attentions
    found: dict[Example, tuple[Outcome, ...]] = {}
    total = sum(len(own) for own, _ in measurements) * (1 + len(masks))
    below = unchanged_below(model, checkpoint, decoder=not decodes)
    needed = dict.fromkeys(name for masked_in, _ in masks for name in below[masked_in])
    with torch.inference_mode(), progress("running without heads", total, "examples") as advance:
        for own, run in measurements:
            with recording(model, needed) as kept:
                runs = [run()]
            advance(len(own))
            for masked_in, values in masks:
                shared = {name: kept[name] for name in below[masked_in]}
                with replaying(model, shared), masked_heads(model, layers, {masked_in: torch.tensor(values)}):
                    runs.append(run())
                advance(len(own))
            found |= zip(own, zip(*runs, strict=True), strict=True)
    examples = sorted(found)
    return examples, [[found[example][run] for example in examples] for run in range(1 + len(masks))]


def batch_measurements(
    model: Any,
    batches: Sequence[Batch],
    metric: EffectMetric,
    pooling: Pooling | None = None,
) -> list[Measurement]:
    """Measurements of batches by a metric that needs no search.

    Args:
        metric: `loss`: each example's mean token loss; `accuracy`: 1 if the model chooses its class, else 0;
            `cosine`: cosine of a text's vector with the vector of the first run, which is of the whole model.
        pooling: pooling of the vector of a text.
    """
    whole: dict[int, torch.Tensor] = {}

    def run(batch: Batch) -> list[Outcome]:
        if metric == "accuracy":
            logits = model(**batch.arguments(model)).logits
            found = (logits.argmax(dim=-1).cpu() == batch.labels).double()
        elif pooling is not None:
            vectors = batch_vectors(model, pooling, batch)
            found = functional.cosine_similarity(vectors, whole.setdefault(id(batch), vectors))
        else:
            found = example_losses(model, batch)
            require_finite(found, batch)
        return [*found.tolist()]

    return [(tuple((batch.text, index) for index in batch.indices), partial(run, batch)) for batch in batches]


def translation_measurements(
    model: Any, tokenizer: Any, text: ParallelText, pair: tuple[str, str], options: DecodingOptions
) -> list[Measurement]:
    """Measurements of the translation of each sentence of `pair[0]` into `pair[1]`, by beam search.

    Raises:
        DataError: the tokenizer lacks a language.
    """
    batches, search = batched_search(model, tokenizer, text.sentences[pair[0]], pair, options)

    def run(rows: Sequence[int]) -> list[str]:
        return [made.text for made in search(rows)]

    name = pair_name(*pair)
    return [(tuple((name, index) for index in rows), partial(run, rows)) for rows in batches]


def ablation_fields(
    checkpoint: Checkpoint,
    model: Any,
    metric: EffectMetric,
    options: ScoreOptions,
    data: Dataset,
    selected: Dataset | None,
    progress: Progress,
) -> dict[str, Any]:
    """Fields of `Scores` for heads that are scored by masks.

    Parts that a mask does not change run once per batch: the layers below an attention and, for attentions of the
    decoder, the encoder. A beam search shares the encoder alone. Sentences of all pairs count as one corpus. After
    chrF++ or BLEU the other one is in `also`: it costs no further search.

    Args:
        model: the model of `checkpoint`.
        metric: the metric of the model with and without heads.
        options: method, batch size, search and significance test.
        selected: text that the best heads are chosen on, if `data` only reports them.

    Raises:
        PruneError: text or model that cannot be used.
    """
    tokenizer, layers = load_tokenizer(checkpoint.path), checkpoint.layout.own_attentions

    def measure(data: Dataset, masks: Sequence[HeadMask]) -> tuple[int, list[dict[str, Any]]]:
        """Number of examples, and fields of `unit_scores.Effects` for each metric, first `metric`.

        chrF++ and BLEU are compared by the paired bootstrap (Koehn 2004), means of other metrics by a paired t-test.
        """
        text = data.text
        if metric in TEXT_METRICS and isinstance(text, ParallelText):
            runs = [
                one
                for pair in data.pairs
                for one in translation_measurements(model, tokenizer, text, pair, options.decoding)
            ]
            examples, outcomes = measure_masked(checkpoint, model, runs, masks, progress, decodes=True)
            lines = {pair_name(*pair): text.sentences[pair[1]] for pair in data.pairs}
            references = [lines[name][index] for name, index in examples]
            known = make_metrics(None)
            metrics = {str(name): known[name] for name in sorted(TEXT_METRICS, key=metric.__ne__)}
            values = {
                name: [own.corpus_score(texts, [references]).score for texts in outcomes]
                for name, own in metrics.items()
            }
            with progress("testing significance", None, "resamples"):
                tests = paired_bootstrap(outcomes, references, metrics, options.samples, options.seed)
            p_values = {name: [test[name]["p_value"] for test in tests[1:]] for name in metrics}
        else:
            pooling = read_pooling(checkpoint.path) if data.task == "embedding" else None
            batches = task_batches(tokenizer, model, data, options.batch_tokens, pooling)
            runs = batch_measurements(model, batches, metric, pooling)
            examples, outcomes = measure_masked(checkpoint, model, runs, masks, progress)
            values = {metric: np.mean(outcomes, axis=1).tolist()}
            # p is 1 if there is nothing to test with, as for a single example.
            tested = (paired_t_test(outcomes[0], own) for own in outcomes[1:])
            p_values = {metric: [1.0 if p_value is None else p_value for p_value in tested]}
        return len(examples), [
            {"metric": name, "base": float(base), "values": own, "p_values": p_values[name]}
            for name, (base, *own) in values.items()
        ]

    examples, effects = measure(selected or data, masks_of(layers, options.metric))
    ends = list(accumulate(layer.count for layer in layers))[:-1]
    for found in effects:
        for name in ("values", "p_values"):
            of_layers = zip(layers, np.split(np.array(found[name]), ends), strict=True)
            found[name] = {axis_name(layer.name, "head"): values.tolist() for layer, values in of_layers}
    fields = {"examples": examples, **effects[0], "also": effects[1:]}
    if options.metric == "all-but-one":
        # The best single head (3.3), the first of equal ones.
        pick = np.argmin if metric == "loss" else np.argmax
        held = {axis_name(layer.name, "head"): layer for layer in layers if layer.count}
        fields["best"] = best = {
            name: layer.heads[int(pick(fields["values"][name]))] for name, layer in held.items()
        }
        if selected is not None:
            # The score of each single head on other text (appendix A).
            masks = [
                (layer.name, tuple(float(head == best[name]) for head in layer.heads))
                for name, layer in held.items()
            ]
            examples, (found, *_) = measure(data, masks)
            only, p_value = (dict(zip(best, found[name], strict=True)) for name in ("values", "p_values"))
            fields["reported"] = Reported(
                metric=metric, examples=examples, base=found["base"], only=only, p_value=p_value
            )
    return fields
