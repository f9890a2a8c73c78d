"""The quality of models on a little text: of a result beside its original, and of everything that `shrink` tries."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prunecli.errors import DataError, MemoryShortError, PruneError
from prunecli.evaluation.language_model import Reference
from prunecli.evaluation.on_text import RunOptions
from prunecli.evaluation.tasks import class_logits, cosines, outputs_of, perplexity, text_vectors
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.history import pairs_of_steps
from prunecli.modules.devices import choose_devices
from prunecli.modules.fitting import fitting_dtype
from prunecli.modules.pooling import read_pooling
from prunecli.progress import Progress, Say, silent
from prunecli.results.rewriting import Quality, QualityChange
from prunecli.running.batches import measure_losses, task_batches
from prunecli.running.encoding import text_examples
from prunecli.running.layerwise.runner import make_runner
from prunecli.text.choice import Dataset, TaskName, Text, TextChoice, all_texts, task_of
from prunecli.text.parallel import ParallelText, has_split
from prunecli.text.plain import PlainText
from prunecli.text.tokens import load_tokenizer

BATCH_TOKENS = 2048
TOKENS = 2048
"""Tokens that a result is checked on, about."""
RUINED_FACTOR = 10.0
"""A model is ruined if its perplexity is larger than the original's by this factor."""
RUINED_COSINE = 0.5
"""A model is ruined if the mean cosine of its vectors to the original's is smaller."""
CHARACTERS = 4
"""Characters of a token, about."""
LINE_TOKENS = 32
"""Tokens of a sentence, about."""
MOST_PAIRS = 8
UNMEASURED = "The quality of the result is not measured: {}"


def little(data: Dataset, tokens: int) -> Dataset:
    """The beginning of a text that has so many tokens, about.

    Of parallel text `MOST_PAIRS` are read: more pairs would leave few sentences of each.
    """
    data = replace(data, pairs=data.pairs[:: -(-len(data.pairs) // MOST_PAIRS) or 1])
    share = tokens * CHARACTERS / max(characters_of(data), 1)
    return replace(data, text=part_of(data.text, 0.0, min(share, 1.0)))


def characters_of(data: Dataset) -> int:
    """Characters of a text, about; a sentence of parallel text counts as one of `LINE_TOKENS`."""
    text = data.text
    if isinstance(text, PlainText):
        return sum(map(len, text.texts))
    pairs = max(len(data.pairs), 1)
    return len(text) * pairs * LINE_TOKENS * CHARACTERS


def part_of(text: Text, start: float, stop: float) -> Text:
    """The part of a text between two fractions of its length; a whole document is cut at a line end."""
    if isinstance(text, PlainText) and text.whole_files:
        found = []
        for whole in text.texts:
            places = [round(share * len(whole)) for share in (start, stop)]
            # The next line end, or the place itself if there is none; the ends of the text stay.
            first, last = (
                max(whole.find("\n", place - 1) + 1, place) if 0 < place < len(whole) else place
                for place in places
            )
            found.append(whole[first:last])
        kept = [number for number, one in enumerate(found) if one.strip()]
        names = tuple(text.names[number] for number in kept) if text.names else ()
        return replace(text, texts=tuple(found[number] for number in kept), names=names)
    first = round(start * len(text))
    return text.cut(slice(first, max(round(stop * len(text)), first + 1)))


@dataclass
class Measurer:
    """Measures models on one text: the original first, which the others are compared with.

    Attributes:
        source: the original.
        data: the text.
        running: how the models run.
        diverges: whether the divergence from the original is measured, if the models are held whole: for it the
            original's output layer is kept.
        original: quality of the original.
        tokens: number of tokens that the original's loss is a mean of.
        first: vectors `[texts, width]` or classes `[texts]` by the original, if its quality is no loss.
    """

    source: Checkpoint
    data: Dataset
    running: RunOptions = field(default_factory=RunOptions)
    progress: Progress = silent
    diverges: bool = True

    def __post_init__(self) -> None:
        memory = self.running.memory
        self._devices = choose_devices(self.running.device)
        # Layer by layer no batch takes more than an example, as where the units were scored.
        self._batch_tokens = BATCH_TOKENS if memory is None else 1
        self._dtype = fitting_dtype({str(self.source.path): self.source}, self._devices, memory=memory)
        self.first: Any = None
        self.tokens = 0
        self._reference: Reference | None = None
        self.original = self.measure(self.source.path, "the original")

    def measure(self, path: Path, what: str, *, same_tokens: bool = True) -> Quality:
        """Quality of the model of a checkpoint.

        Args:
            what: name of the model, for the progress.
            same_tokens: whether the model has the original's vocabulary.

        Raises:
            DataError: an output of the original is not finite.
            PruneError: a model or text that cannot be used.
        """
        gc.collect()  # before the next model is loaded
        data, what = self.data, f"measuring {what}"
        place = self.running.memory, self.running.spill_directory
        runner = make_runner(open_model(path), self._devices, self._dtype, *place)
        try:
            tokenizer = load_tokenizer(path)
            if data.task == "embedding":
                vectors = text_vectors(
                    runner,
                    tokenizer,
                    read_pooling(path),
                    all_texts(data.text, data.pairs),
                    self._batch_tokens,
                    what,
                    self.progress,
                )
                if self.first is None:
                    self.first = vectors
                cosine = float(cosines(self.first, vectors).mean())
                return Quality(cost=1 - cosine, cosine=cosine)
            if data.task == "classification" and isinstance(data.text, PlainText):
                batches = text_examples(tokenizer, runner.model, data.text.texts).batches(1)
                forward, line = partial(class_logits, runner.model), (what, len(batches), "examples")
                classes = outputs_of(runner, batches, forward, line, self.progress).argmax(axis=-1)
                if self.first is None:
                    self.first = classes
                return Quality(cost=float((classes != self.first).mean()))
            batches = task_batches(tokenizer, runner.model, data, self._batch_tokens)
            found = {}
            if data.task == "lm" and same_tokens and self.diverges and self.running.memory is None:
                self._reference = self._reference or Reference(batches)
                compared = self._reference.measure(runner, what, self.progress)
                nats, tokens = compared["nats"], compared["tokens"]
                found["divergence"] = float(compared["divergence"].sum() / tokens.sum())
            else:
                count = 1 + max(max(batch.indices) for batch in batches)
                nats, tokens = measure_losses(runner, batches, count, what, self.progress)
        except DataError:
            if not hasattr(self, "original"):
                raise
            return Quality(cost=None)
        self.tokens = self.tokens or int(tokens.sum())
        loss = float(nats.sum()) / self.tokens  # a trimmed vocabulary cuts the text into more tokens
        return Quality(cost=loss, loss=loss, **found)


def quality_check(
    source: Checkpoint,
    named: Path | None,
    scored: TextChoice | None,
    steps: Sequence[Mapping[str, Any]],
    running: RunOptions,
    progress: Progress,
    say: Say,
) -> Callable[[Path], QualityChange | None] | None:
    """Measure a model before a reduction, at once; return the function that measures the result afterwards.

    Both return None if the model does not fit in memory, or cannot be measured on text that is not `named`.

    Args:
        source: the model that gets smaller.
        named: text to measure on: a file of plain text; for a model that translates, a directory of aligned text.
        scored: the text that the scores come from. Without `named` the check reads what gave no scores, if there is
            any: another split, or the texts behind `max_sentences`.
        steps: history of the result; language pairs that it was not pruned for are left out.
        running: how the models run.
        say: called with the reason why nothing is measured.

    Raises:
        PruneError: the `named` text, or a model that cannot be measured on it.
    """
    try:
        data, is_scored = _read(source, named, scored)
        data = little(replace(data, task=task_of(source), pairs=pairs_of_steps(steps, data.pairs)), TOKENS)
        measurer = Measurer(source, data, running, progress, diverges=False)
    except PruneError as error:
        if named is not None and not isinstance(error, MemoryShortError):
            raise
        say(UNMEASURED.format(error.message))
        return None
    before, text = measurer.original, data.text

    def compare(result: Path) -> QualityChange | None:
        try:
            after = measurer.measure(result, "the result")
        except PruneError as error:  # the result is there, and right
            say(UNMEASURED.format(error.message))
            return None
        fields: dict[str, Any] = {
            "text": [text.split] if isinstance(text, ParallelText) else [path.name for path in text.files],
            "text_of_scores": is_scored,
            "count": measurer.tokens or len(text),
        }
        if before.loss is None:
            alike = 0.0 if after.cost is None else 1 - after.cost
            fields["measure"], least = "cosine", RUINED_COSINE
            if data.task == "classification":
                classes = measurer.first
                fields["measure"], least = "same_class", np.bincount(classes).max() / len(classes)
            return QualityChange(**fields, after=round(alike, 4), ruined=alike < least)
        return QualityChange(
            **fields,
            measure="loss",
            before=round(before.loss, 4),
            after=None if after.loss is None else round(after.loss, 4),
            ruined=after.loss is None or after.loss - before.loss > math.log(RUINED_FACTOR),
        )

    return compare


def _read(source: Checkpoint, named: Path | None, scored: TextChoice | None) -> tuple[Dataset, bool]:
    """The text to measure on, and whether scores come from the same text."""
    choice = scored or TextChoice()
    if task_of(source) == "translation":
        folder = named or choice.data or (None if choice.source_file else choice.demo)
        if folder is None:
            return choice.read("translation"), True
        used = (choice.split_read or "val") if named is None else None
        others = (name for name in ("test", "dev", "val") if name != used and has_split(folder, name))
        split = next(others, used)
        text = TextChoice(data=folder, split=split, langs=choice.langs, pairs=choice.pairs)
        return text.read("translation"), split == used
    if named is not None:
        choice = TextChoice(files=(named,))

    task: TaskName = "lm" if task_of(source) == "lm" else "mlm"
    data = choice.read(task)
    if named is None and choice.max_sentences is not None:
        whole = choice.updated(max_sentences=None).read(task).text
        assert isinstance(whole, PlainText)
        if rest := whole.texts[len(data.text) :]:
            return replace(data, text=PlainText(whole.files, rest)), False
    return data, named is None


def change_line(change: QualityChange) -> str:
    """One line about a quality change, for the terminal."""
    text = ", ".join(change.text) + (" (the text of the scores)" if change.text_of_scores else "")
    if change.measure == "cosine":
        return (
            f"Vectors of {change.count:,} texts of {text}: mean cosine to the original's {change.after:.3f}"
        )
    if change.measure == "same_class":
        return f"Classes of {change.count:,} texts of {text}: {change.after:.1%} as before"
    both = [math.inf if loss is None else loss for loss in (change.before, change.after)]
    losses, perplexities = (
        " -> ".join(f"{value:,.{digits}f}" for value in values)
        for values, digits in ((both, 2), (map(perplexity, both), 1))
    )
    return f"Loss on {change.count:,} tokens of {text}: {losses} (perplexity {perplexities})"
