"""Checkpoints side by side at classification, masked and causal language modelling, and vectors of texts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from prunecli.errors import UsageError
from prunecli.evaluation.hardware import threads, threads_for
from prunecli.evaluation.measured import Measured
from prunecli.evaluation.options import EvaluationOptions
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.text.choice import Dataset, described
from prunecli.text.labelled import LabelledText, label_ids
from prunecli.text.plain import PlainText

if TYPE_CHECKING:
    import torch

    from prunecli.evaluation.causal import CausalModels
    from prunecli.evaluation.embedding import EmbeddingModels
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.results.evaluation import Evaluation
    from prunecli.running.layerwise.runner import RunReport
    from prunecli.running.runner import Runner


OtherTask = Literal["classification", "mlm", "lm", "embedding"]
"""What is measured but translation, which has `prunecli.evaluation.translation`."""
TESTS: Mapping[OtherTask, tuple[str, str]] = {
    "classification": ("McNemar, exact", "accuracy"),
    "mlm": ("paired t-test", "loss"),
    "lm": ("paired t-test", "bits_per_byte"),
}
"""Task -> the test of significance, and the score that it tests."""
OF_WINDOWS = ("paired t-test over the windows' losses", "perplexity")
"""The same for `lm` where files are whole documents."""
LAYER_MAJOR: tuple[OtherTask, ...] = ("lm", "mlm")
"""Tasks that can run layer by layer."""


def evaluate_task(
    checkpoints: Mapping[str, Path],
    data: Dataset,
    options: EvaluationOptions,
    output: Path | None = None,
    *,
    force: bool = False,
    progress: Progress = silent,
    report: Callable[[str, RunReport], None] = lambda _label, _work: None,
    say: Say = unsaid,
) -> Evaluation:
    """Measure each checkpoint at the task of `data`, compare with the first, write `output`.

    `lm`: perplexity and bits per byte, divergence from the first (`CausalModels`); paired t-test over the texts' bits
    per byte, or over the windows' losses where files are whole documents. `mlm`: the loss of hidden tokens;
    paired t-test over the texts' mean losses. `classification`: accuracy, F1 and Matthews correlation;
    McNemar's exact test. `embedding`: cosine to the first one's vectors; of scored pairs Spearman's correlation, of
    aligned sentences the accuracy of retrieval, by McNemar's exact test.

    Args:
        checkpoints: label -> directory, the baseline first.
        data: plain text, labelled for classification, any for embedding.
        output: None: nothing is written.
        report: called for each checkpoint that was run layer by layer with what that took.
        say: hears of the type that all are computed in, where it is not what is stored.

    Returns:
        What was written.

    Raises:
        PruneError: a checkpoint, text, option or output that cannot be used.
    """
    from prunecli.evaluation.paired import mcnemar_test, paired_t_test
    from prunecli.model.checkpoint import open_model
    from prunecli.results.evaluation import Evaluated, Evaluation
    from prunecli.results.header import header, sizes
    from prunecli.tensors.documents import refuse_unwritable, write_json

    if output is not None:
        refuse_unwritable(output, force=force)
    task, text = data.task, data.text
    assert task != "translation"
    opened = {label: open_model(path) for label, path in checkpoints.items()}
    if isinstance(text, LabelledText) and task == "classification":
        for checkpoint in opened.values():  # an unknown label is refused before a model is loaded
            if isinstance(names := checkpoint.config.get("id2label"), Mapping):
                label_ids(text, {int(number): str(name) for number, name in names.items()})
    if options.memory is not None:
        _check_by_layer(opened.values())
    options = replace(options, dtype=_dtype(opened, task, options, say))
    with ExitStack() as kept:
        kept.enter_context(threads(threads_for(opened.values())))
        causal = embedding = None
        if task == "lm" and isinstance(text, PlainText):
            from prunecli.evaluation.causal import CausalModels

            causal = kept.enter_context(CausalModels(checkpoints, text, data.context, options, say))
        elif task == "embedding":
            from prunecli.evaluation.embedding import EmbeddingModels

            embedding = EmbeddingModels(data, options.decoding.batch_tokens, say)
        measured = {
            label: _measure(label, checkpoint, causal or embedding, data, options, progress, report)
            for label, checkpoint in opened.items()
        }
    whole = isinstance(text, PlainText) and text.whole_files and task == "lm"
    test = OF_WINDOWS if whole else TESTS.get(task) if embedding is None else embedding.test
    examples = [] if causal is None else causal.examples()
    (baseline, first), results = next(iter(measured.items())), []
    for label, one in measured.items():
        compared: dict[str, Any] = {}
        if label != baseline and test is not None:
            function, p_value = mcnemar_test if test[0].startswith("McNemar") else paired_t_test, None
            if len(first.values) == len(one.values):  # else windows of another tokenizer
                p_value = function(first.values, one.values)
            compared["p_value"] = None if p_value is None else round(p_value, 6)
        results.append(
            Evaluated(
                checkpoint=label,
                dtype=options.dtype,
                **one.windows,
                **sizes(opened[label]),
                scores=_rounded(one.scores),
                by_text={name: _rounded(own) for name, own in one.by_text.items()},
                **compared,
            )
        )
    tested = None
    if test is not None and len(measured) > 1:
        tested = {
            "test": test[0],
            "of": test[1],
            "level": options.level,
            "baseline": baseline,
            "examples": len(first.values),
        }
    evaluation = Evaluation(
        **header(Evaluation.FORMAT, list(opened.values()), options.seed if task == "mlm" else None),
        task=task,
        data={"texts": len(text), **described(text)},
        significance=tested,
        results=results,
        examples=examples,
    )
    if output is not None:
        write_json(output, evaluation.to_json(), force=force)
    return evaluation


def _check_by_layer(checkpoints: Iterable[Checkpoint]) -> None:
    """Refuse a mixture that is not run layer by layer before another checkpoint is measured."""
    from prunecli.modules.stock_model import refused_by_layer
    from prunecli.modules.stock_names import REMEDY

    for checkpoint in checkpoints:
        if checkpoint.family is None:
            checkpoint.require_architecture()
        if checkpoint.runs_stock and (refused := refused_by_layer(checkpoint)) is not None:
            raise UsageError(f"--memory: {refused}", REMEDY)


def _dtype(opened: Mapping[str, Checkpoint], task: OtherTask, options: EvaluationOptions, say: Say) -> str:
    """The type of all models; layer by layer any size fits."""
    from prunecli.model.cost import head_bytes
    from prunecli.modules.devices import choose_devices
    from prunecli.modules.fitting import candidates, dtype_name, fitting_dtype
    from prunecli.tensors.dtypes import parse_dtype

    devices = choose_devices(options.device)
    if options.memory is not None:
        return dtype_name(candidates(options.dtype, opened.values(), devices.first)[0])
    by_layer, first = "--memory" if task in LAYER_MAJOR else "", next(iter(opened.values()))

    def head(checkpoint: Checkpoint, dtype: torch.dtype) -> Mapping[str, int]:
        """The head of the model that others are compared with (see `divergence.Reference`)."""
        kept = 0 if task != "lm" or checkpoint is first else head_bytes(first, parse_dtype(str(dtype)))
        return {"head of the first model": kept} if kept else {}

    return dtype_name(
        fitting_dtype(opened, devices, options.dtype, beside=head, only_runs=True, by_layer=by_layer, say=say)
    )


def _measure(
    label: str,
    checkpoint: Checkpoint,
    side_by_side: CausalModels | EmbeddingModels | None,
    data: Dataset,
    options: EvaluationOptions,
    progress: Progress,
    report: Callable[[str, RunReport], None],
) -> Measured:
    from prunecli.evaluation.classification import accuracy, classify, f1_scores, matthews_correlation
    from prunecli.evaluation.embedding import EmbeddingModels
    from prunecli.evaluation.language_model import mlm_losses, perplexity
    from prunecli.modules.devices import choose_device
    from prunecli.modules.fitting import choose_dtype
    from prunecli.modules.loading import load_model
    from prunecli.running.layerwise.runner import Layerwise, Resources, RunReport
    from prunecli.running.lengths import window_length
    from prunecli.running.runner import InMemory
    from prunecli.text.tokens import load_tokenizer

    text, tokenizer, batch_tokens = data.text, load_tokenizer(checkpoint.path), options.decoding.batch_tokens
    runner: Runner
    if options.memory is not None and isinstance(text, PlainText):
        device, run_report = choose_device(options.device), RunReport()
        dtype = choose_dtype(options.dtype, checkpoint, device)
        resources = Resources(device, dtype, options.memory, options.spill_directory)
        runner = Layerwise(checkpoint, resources, run_report, output=True)
    else:
        run_report = None
        runner = InMemory(load_model(checkpoint.path, device=options.device, dtype=options.dtype))
    if isinstance(side_by_side, EmbeddingModels):
        measured = side_by_side.measure(label, checkpoint.path, runner, tokenizer, progress)
    elif side_by_side is not None:
        measured = side_by_side.measure(label, runner, tokenizer, progress)
    elif isinstance(text, LabelledText):
        predictions = classify(
            runner, tokenizer, text, batch_tokens, what=f"{label}: classifying", progress=progress
        )
        by_class, names = f1_scores(predictions), runner.model.config.id2label
        scores = {
            "accuracy": accuracy(predictions),
            "f1": float(np.mean(list(by_class.values()))),
            "matthews": matthews_correlation(predictions),
            "loss": float(predictions.losses.mean()),
            "f1_by_class": {str(names[number]): round(value, 6) for number, value in by_class.items()},
        }
        measured = Measured(scores, predictions.right)
    else:
        assert isinstance(text, PlainText)
        length = window_length(runner.model, tokenizer, data.context)
        losses = mlm_losses(
            runner,
            tokenizer,
            text.texts,
            batch_tokens,
            context=length,
            seed=options.seed,
            what=f"{label}: reading",
            progress=progress,
        )
        loss = losses.loss
        scores = {"perplexity": perplexity(loss), "loss": loss, "tokens": int(losses.tokens.sum())}
        measured = Measured(scores, losses.nats / np.maximum(losses.tokens, 1), {"context": length})
    if run_report is not None:
        report(label, run_report)
    del runner
    gc.collect()  # before the next checkpoint is loaded
    return measured


def _rounded(scores: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in scores.items()}
