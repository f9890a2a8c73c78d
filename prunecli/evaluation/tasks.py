"""The base of the tasks that `evaluate` measures; masked language modelling, classification and embedding."""

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from prunecli.errors import DataError
from prunecli.evaluation.options import EvaluationOptions
from prunecli.evaluation.scoring import mcnemar_test, paired_t_test, rounded
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Bools, Floats
from prunecli.modules.building import refused_by_layer
from prunecli.modules.devices import choose_devices
from prunecli.modules.fitting import dtype_name, fitting_dtype
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.processes import ProcessGroup
from prunecli.progress import Progress, Say
from prunecli.results.document import Json, sizes
from prunecli.results.evaluation import Evaluation
from prunecli.running.batches import Line, batch_vectors, measure_losses, require_finite, run_forward
from prunecli.running.encoding import embedding_examples, labelled_examples, mlm_examples, window_length
from prunecli.running.examples import Batch
from prunecli.running.layerwise.runner import Runner, make_runner
from prunecli.text.choice import Dataset, columns, described
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.plain import LabelledText, PlainText, label_ids
from prunecli.text.tokens import Tokenizer, load_tokenizer

Ints = NDArray[np.int64]
T_TEST, MCNEMAR = "paired t-test", "McNemar, exact"


@dataclass
class Task(ABC):
    """One evaluation: measures checkpoints one after another, the baseline first, then compares them.

    Attributes:
        opened: label -> checkpoint.
        measured: label -> what `measure` stored of this checkpoint.
        output: file for the result, replaced with `force`; None: nothing is written.
    """

    opened: Mapping[str, Checkpoint]
    data: Dataset
    options: EvaluationOptions
    progress: Progress
    say: Say
    process_group: ProcessGroup
    output: Path | None
    force: bool

    def __post_init__(self) -> None:
        """Check everything that can be checked before a model is loaded, and choose one dtype for all models.

        Raises:
            PruneError: a checkpoint, text or option that cannot be used.
        """
        self.measured: dict[str, Any] = {}
        self.prepare()
        options = self.options
        dtype = fitting_dtype(
            self.opened, choose_devices(options.device), options.dtype, say=self.say, **self.needs()
        )
        self.options = options.updated(dtype=dtype_name(dtype))

    def prepare(self) -> None:  # noqa: B027 (nothing to check by default)
        """Check the options of the task."""

    @abstractmethod
    def needs(self) -> dict[str, Any]:
        """The arguments of `fitting_dtype` that say what a run holds besides the weights."""

    @abstractmethod
    def measure(self, label: str) -> None:
        """Run one checkpoint, and store in `measured` what `fields` needs."""

    @abstractmethod
    def fields(self) -> Json:
        """The fields of evaluation.json that this task fills."""

    def save(self, evaluation: Evaluation) -> None:
        """Write the result, if it has a file."""

        if self.output is not None:
            evaluation.write(self.output, force=self.force)

    def close(self) -> None:  # noqa: B027 (nothing to close by default)
        """Free what is stored between checkpoints."""


@dataclass(frozen=True)
class Measured:
    """Scores of one checkpoint.

    Attributes:
        scores: of all texts.
        values: one for each example, for the paired test against the baseline's.
        windows: `context` and `stride`, for the file.
        by_text: name of texts -> their scores.
    """

    scores: Json
    values: NDArray[Any]
    windows: Json = field(default_factory=dict)
    by_text: dict[str, Json] = field(default_factory=dict)


class ModelTask(Task):
    """A task that runs a loaded model over batches and scores each example; all tasks except translation.

    Attributes:
        test: name of the paired test over the examples, and the score that it tests; None: no test.
        by_layer: the option that has the task run layer by layer; "": it cannot.
    """

    test: tuple[str, str] | None = None
    by_layer: ClassVar[str] = ""

    @abstractmethod
    def run(self, label: str, runner: Runner, tokenizer: Tokenizer) -> Measured:
        """Measure one checkpoint.

        Raises:
            PruneError: a model or text that cannot be used; a result that is not finite.
        """

    def kept_bytes(self, _checkpoint: Checkpoint, _dtype: torch.dtype) -> Mapping[str, int]:
        """Bytes that are kept from earlier models while a checkpoint runs, by name."""
        return {}

    def needs(self) -> dict[str, Any]:
        """See `Task`; any size fits layer by layer."""

        memory = self.options.memory
        for checkpoint in self.opened.values() if memory is not None else ():
            if checkpoint.runs_stock and (refused := refused_by_layer(checkpoint)) is not None:
                raise refused
        return {
            "beside": self.kept_bytes,
            "only_runs": memory is None,
            "memory": memory,
            "by_layer": self.by_layer,
        }

    def measure(self, label: str) -> None:
        """See `Task`."""

        checkpoint, options = self.opened[label], self.options
        tokenizer = load_tokenizer(checkpoint.path)
        runner = make_runner(
            checkpoint,
            choose_devices(options.device),
            options.dtype,
            options.memory,
            options.spill_directory,
        )
        self.measured[label] = self.run(label, runner, tokenizer)
        if runner.report is not None:
            self.say(f"{label}: {runner.report.line()}")
        del runner
        gc.collect()  # before the next checkpoint is loaded

    def fields(self) -> Json:
        """See `Task`."""

        (baseline, first), rows = next(iter(self.measured.items())), []
        for label, own in self.measured.items():
            row = {
                "checkpoint": label,
                "dtype": self.options.dtype,
                **own.windows,
                **sizes(self.opened[label]),
                "scores": rounded(own.scores),
                "by_text": {name: rounded(scores) for name, scores in own.by_text.items()},
            }
            if label != baseline and self.test is not None:
                function = mcnemar_test if self.test[0] == MCNEMAR else paired_t_test
                # Windows of another tokenizer are other examples.
                same = len(first.values) == len(own.values)
                p_value = function(first.values, own.values) if same else None
                row["p_value"] = None if p_value is None else round(p_value, 6)
            rows.append(row)
        tested = None
        if self.test is not None and len(rows) > 1:
            tested = {
                "test": self.test[0],
                "of": self.test[1],
                "level": self.options.level,
                "baseline": baseline,
                "examples": len(first.values),
            }
        text = self.data.text
        data = {"texts": len(text), **described(text)}
        return {"data": data, "significance": tested, "results": rows, "examples": []}


class MaskedLanguageModel(ModelTask):
    """`mlm`: the loss of hidden tokens; paired t-test over the texts' mean losses."""

    test = (T_TEST, "loss")
    by_layer = "--memory"

    def run(self, label: str, runner: Runner, tokenizer: Tokenizer) -> Measured:
        """See `ModelTask`."""

        text, options = self.data.text, self.options
        assert isinstance(text, PlainText)
        length = window_length(runner.model, tokenizer, self.data.context)
        examples = mlm_examples(tokenizer, runner.model, text.texts, context=length, seed=options.seed)
        batches = examples.batches(options.batch_tokens)
        nats, tokens = measure_losses(runner, batches, len(text), f"{label}: reading", self.progress)
        scores: dict[str, Json] = {}
        for name, rows in {"": [*range(len(text))], **text.by_name}.items():
            count = int(tokens[rows].sum())
            loss = float(nats[rows].sum() / max(count, 1))
            scores[name] = {"perplexity": perplexity(loss), "loss": loss, "tokens": count}
        return Measured(scores.pop(""), nats / np.maximum(tokens, 1), {"context": length}, scores)


class Classification(ModelTask):
    """`classification`: accuracy, F1 and Matthews correlation; McNemar's exact test."""

    test = (MCNEMAR, "accuracy")

    def prepare(self) -> None:
        """Refuse an unknown label."""
        assert isinstance(self.data.text, LabelledText)
        for checkpoint in self.opened.values():
            if isinstance(names := checkpoint.config.get("id2label"), Mapping):
                label_ids(self.data.text, {int(number): str(name) for number, name in names.items()})

    def run(self, label: str, runner: Runner, tokenizer: Tokenizer) -> Measured:
        """See `ModelTask`."""
        text, names = self.data.text, runner.model.config.id2label
        assert isinstance(text, LabelledText)
        examples = labelled_examples(tokenizer, runner.model, text)
        batches = examples.batches(self.options.batch_tokens)
        line, forward = (f"{label}: classifying", len(text), "examples"), partial(class_logits, runner.model)
        logits = torch.from_numpy(outputs_of(runner, batches, forward, line, self.progress))
        right = examples.labels
        assert isinstance(right, Tensor)
        losses = functional.cross_entropy(logits, right, reduction="none")
        require_finite(losses, Batch({}, right, tuple(range(len(text)))))
        chosen, labels = logits.argmax(dim=1).numpy(), right.numpy()  # of equal logits the first
        by_class, matthews = class_scores(chosen, labels)
        scores = {
            "accuracy": float((chosen == labels).mean()),
            "f1": float(np.mean(list(by_class.values()))),
            "matthews": matthews,
            "loss": float(losses.double().mean()),
            "f1_by_class": {str(names[number]): round(value, 6) for number, value in by_class.items()},
        }
        return Measured(scores, chosen == labels)


def class_logits(model: Any, batch: Batch) -> Tensor:
    """`[B, classes]` float32."""
    logits: Tensor = model(**batch.arguments(model)).logits
    return logits.float()


def outputs_of(
    runner: Runner,
    batches: Sequence[Batch],
    forward: Callable[[Batch], Tensor],
    line: Line,
    progress: Progress,
) -> NDArray[Any]:
    """`[examples, …]`: a row of `forward` for each example, by its number."""
    found: dict[int, NDArray[Any]] = {}

    def finish(batch: Batch, rows: Tensor) -> int:
        found.update(zip(batch.indices, rows.cpu().numpy(), strict=True))
        return len(rows)

    run_forward(runner, batches, forward, finish, line, progress)
    return np.stack([found[number] for number in sorted(found)])


def class_scores(chosen: Ints, labels: Ints) -> tuple[dict[int, float], float]:
    """F1 of every class in `chosen` or `labels`, and Matthews' correlation of both, from their confusion matrix.

    `F1 = 2 TP / (2 TP + FP + FN)`; its mean over the classes is macro F1. The correlation is that of Gorodkin 2004, for
    any number of classes (CoLA's measure); 0 if all labels, or all chosen classes, are equal.
    """
    table = pd.crosstab(labels, chosen)
    classes = table.index.union(table.columns)
    table = table.reindex(index=classes, columns=classes, fill_value=0)
    hits, right, called, count = np.diag(table), table.sum(axis=1), table.sum(axis=0), len(labels)
    spread = math.sqrt((count**2 - right @ right) * (count**2 - called @ called))
    matthews = (count * hits.sum() - right @ called) / spread if spread else 0.0
    return (2 * hits / (right + called)).to_dict(), float(matthews)


def perplexity(loss: float) -> float:
    """`exp(loss)`, the loss in nats; bounded, to remain finite."""
    return math.exp(min(loss, 700.0))


Vectors = NDArray[np.float32]

BLOCK = 1 << 24
"""Number of cosines that are held at a time."""


class Embedding(ModelTask):
    """Cosine to the first model's vectors; Spearman's correlation for scored pairs, retrieval for aligned sentences."""

    def prepare(self) -> None:
        """Choose the test: of retrieval, by McNemar's exact test."""
        self.test = (MCNEMAR, "retrieval") if isinstance(self.data.text, ParallelText) else None
        self.first: dict[str, Vectors] = {}

    def run(self, label: str, runner: Runner, tokenizer: Tokenizer) -> Measured:
        """See `ModelTask`."""
        pooling = read_pooling(self.opened[label].path, self.say)
        vectors = {
            name: text_vectors(
                runner,
                tokenizer,
                pooling,
                texts,
                self.options.batch_tokens,
                f"{label}: {name or 'embedding'}",
                self.progress,
                self.data.context,
            )
            for name, texts in columns(self.data.text, self.data.pairs).items()
        }
        self.first = self.first or vectors
        scores: Json = {}
        text, values, by_text = self.data.text, np.zeros(0), dict[str, Json]()
        if all(self.first[name].shape == found.shape for name, found in vectors.items()):
            near = np.concatenate([cosines(self.first[name], found) for name, found in vectors.items()])
            scores = _nearness(near)
            if isinstance(text, PlainText):
                by_text = {name: _nearness(near[rows]) for name, rows in text.by_name.items()}
        if isinstance(text, LabelledText):
            from scipy.stats import spearmanr

            scores["spearman"] = float(spearmanr(_similarities(text), cosines(*vectors.values())).statistic)
        elif isinstance(text, ParallelText):
            right = {
                pair_name(*pair): retrieved(*(vectors[name] for name in pair)) for pair in self.data.pairs
            }
            values = np.concatenate(list(right.values()))
            scores["retrieval"] = float(values.mean())
            scores["retrieval_by_pair"] = {name: round(float(own.mean()), 6) for name, own in right.items()}
        scores["width"] = next(iter(vectors.values())).shape[1]
        return Measured(scores, values, by_text=by_text)


def _nearness(cosines: Floats) -> Json:
    return {"cosine": float(cosines.mean()), "cosine_5_percent": float(np.quantile(cosines, 0.05))}


def text_vectors(
    runner: Runner,
    tokenizer: Any,
    pooling: Pooling,
    texts: list[str],
    batch_tokens: int,
    what: str,
    progress: Progress,
    context: int | None = None,
) -> Vectors:
    """The vector of each text, `[texts, width]`.

    Args:
        what: text of the progress line.
        context: tokens that a text is cut to; None: the model's own limit.

    Raises:
        UnsupportedModelError: an encoder with a decoder.
        UsageError: the model has fewer positions than `context`.
        DataError: a text without a token, or a vector that is not finite.
    """
    examples = embedding_examples(tokenizer, runner.model, pooling, texts, context)
    forward = partial(batch_vectors, runner.model, pooling)
    line = what, len(texts), "texts"
    vectors = outputs_of(runner, examples.batches(batch_tokens), forward, line, progress)
    if not np.isfinite(vectors).all():
        raise DataError("a vector is not finite", "Choose `dtype=float32`.")
    return vectors


def cosines(first: Vectors, second: Vectors) -> Floats:
    """`[texts]`: cosine of each row of both; 0 if a row is 0."""
    one, other = (torch.from_numpy(vectors).double() for vectors in (first, second))
    return np.asarray(functional.cosine_similarity(one, other))


def retrieved(sources: Vectors, targets: Vectors) -> Bools:
    """`[texts]`: whether the target in the same row has the largest cosine of all targets, and no other equals it."""
    ones, others = (
        vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        for vectors in (sources, targets)
    )
    found = np.zeros(len(ones), bool)
    step = max(1, BLOCK // len(others))
    for start in range(0, len(ones), step):
        near = ones[start : start + step] @ others.T
        own = near.diagonal(start)[:, None]
        found[start : start + step] = (near >= own).sum(axis=1) == 1
    return found


def _similarities(text: LabelledText) -> Floats:
    values = pd.to_numeric(pd.Series(text.labels), errors="coerce")
    for row in values.index[~np.isfinite(values)]:
        raise DataError(
            f"{text.path}, line {text.lines[row]:,}: {text.labels[row]!r} is no similarity",
            "Give a number, such as 3.8.",
        )
    if values.nunique() < 2:
        raise DataError(f"{text.path}: all pairs are equally similar", "Give pairs of different similarity.")
    return np.asarray(values, np.float64)
