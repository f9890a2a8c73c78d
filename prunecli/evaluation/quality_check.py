"""The quality of a model on a little text before and after a reduction: seconds of work that show a ruined result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prunecli.evaluation.embedding import cosines, text_vectors
from prunecli.evaluation.on_text import measured_text
from prunecli.evaluation.tasks import perplexity
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.history import pairs_of_steps
from prunecli.modules.devices import choose_devices
from prunecli.modules.fitting import fitting_dtype
from prunecli.modules.loading import load_model
from prunecli.modules.pooling import read_pooling
from prunecli.progress import Progress, silent
from prunecli.results.rewriting import QualityChange
from prunecli.running.batches import run_forward, task_batches
from prunecli.running.encoding import text_examples
from prunecli.running.examples import Batch
from prunecli.running.losses import sum_losses
from prunecli.running.runner import InMemory
from prunecli.text.choice import Dataset, TextChoice
from prunecli.text.parallel import ParallelText, has_split
from prunecli.text.plain import PlainText
from prunecli.text.tasks import task_of
from prunecli.text.tokens import load_tokenizer

TEXT_BYTES = 8000
"""Plain text that is read: about 2,000 tokens."""
SENTENCES = 64
"""Aligned sentences that are read, over all pairs."""
MOST_PAIRS = 8
BATCH_TOKENS = 2048
RUINED_FACTOR = 10.0
"""A model is ruined if its perplexity is larger than the original's by this factor."""
RUINED_COSINE = 0.5
"""A model is ruined if the mean cosine of its vectors to the original's is smaller."""


class QualityCheck:
    """Measures a model before a reduction, at once, and the result afterwards.

    Args:
        source: the model that gets smaller.
        named: text to measure on: a file of plain text; for a model that translates, a directory of aligned text.
        scored: the text that the scores come from. Without `named` the check reads what gave no scores, if there is
            any: another split, or the texts behind `max_sentences`.
        steps: history of the result; language pairs that it was not pruned for are left out.
        device: as in `load_model`.

    Raises:
        PruneError: text or a model that cannot be used.
        MemoryShortError: the model does not fit in memory.
    """

    def __init__(
        self,
        source: Checkpoint,
        named: Path | None,
        scored: TextChoice | None = None,
        steps: Sequence[Mapping[str, Any]] = (),
        device: str = "auto",
        progress: Progress = silent,
    ) -> None:
        self._progress, self._task = progress, task_of(source)
        data, self._is_scored = _read(source, named, scored)
        self._data = little(replace(data, task=self._task), steps)
        self._devices = choose_devices(device)
        self._dtype = fitting_dtype({str(source.path): source}, self._devices)
        self._before = self._measure(source.path)

    def compare(self, result: Path) -> QualityChange:
        """Measure the result.

        Raises:
            PruneError: a model that cannot be run.
        """
        before, after, text = self._before, self._measure(result), self._data.text
        files = [text.split] if isinstance(text, ParallelText) else [path.name for path in text.files]
        fields: dict[str, Any] = {"text": files, "text_of_scores": self._is_scored}
        if self._task == "embedding":
            cosine = float(cosines(before, after).mean()) if np.isfinite(after).all() else 0.0
            fields |= {"measure": "cosine", "count": len(text), "after": round(cosine, 4)}
            return QualityChange(**fields, ruined=cosine < RUINED_COSINE)
        if self._task == "classification":
            classes = before.argmax(axis=1)
            same = float((classes == after.argmax(axis=1)).mean())
            fields |= {"measure": "same_class", "count": len(text), "after": round(same, 4)}
            chance = np.bincount(classes).max() / len(classes)
            return QualityChange(**fields, ruined=same < chance)
        tokens = before[1]  # of both: a trimmed vocabulary cuts a text into more tokens
        old, new = float(before[0] / tokens), float(after[0] / tokens)
        is_finite = math.isfinite(new)
        return QualityChange(
            **fields,
            measure="loss",
            count=int(tokens),
            before=round(old, 4),
            after=round(new, 4) if is_finite else None,
            ruined=not is_finite or new - old > math.log(RUINED_FACTOR),
        )

    def _measure(self, path: Path) -> NDArray[Any]:
        """By task: the vectors of the texts, their logits, or the sum of all losses and the number of tokens `[2]`."""
        model, tokenizer = load_model(path, device=self._devices, dtype=self._dtype), load_tokenizer(path)
        runner, text = InMemory(model), self._data.text
        if isinstance(text, PlainText) and self._task == "embedding":
            return text_vectors(runner, tokenizer, read_pooling(path), list(text.texts), BATCH_TOKENS)
        what, found = "measuring the quality", dict[int, NDArray[Any]]()
        if not isinstance(text, PlainText) or self._task != "classification":
            batches = chain(*task_batches(tokenizer, model, self._data, BATCH_TOKENS).values())
            return np.array(sum_losses(runner, [*batches], what, self._progress))

        def forward(batch: Batch) -> Tensor:
            logits: Tensor = model(**batch.arguments(model)).logits
            return logits

        def finish(batch: Batch, logits: Tensor) -> int:
            found.update(zip(batch.indices, logits.double().cpu().numpy(), strict=True))
            return len(batch.indices)

        examples = text_examples(tokenizer, model, text.texts).batches(1)
        run_forward(runner, examples, forward, finish, (what, len(examples), "examples"), self._progress)
        return np.stack([found[number] for number in sorted(found)])


def little(data: Dataset, steps: Sequence[Mapping[str, Any]] = ()) -> Dataset:
    """A small part of a text: TEXT_BYTES of plain text, SENTENCES of MOST_PAIRS pairs that were not pruned away."""
    text = data.text
    if isinstance(text, ParallelText):
        pairs = pairs_of_steps(steps, data.pairs) or data.pairs
        pairs = pairs[:: math.ceil(len(pairs) / MOST_PAIRS)]
        return replace(data, text=text.first(min(len(text), SENTENCES // len(pairs))), pairs=pairs)
    assert isinstance(text, PlainText)
    kept, left = [], TEXT_BYTES
    for whole in text.texts:
        part = whole.encode()[:left].decode(errors="ignore")
        left -= len(part.encode())
        if part.strip():
            kept.append(part)
    return replace(data, text=PlainText(text.files, tuple(kept)))


def _read(source: Checkpoint, named: Path | None, scored: TextChoice | None) -> tuple[Dataset, bool]:
    """The text to measure on, and whether scores come from the same text."""
    choice = scored or TextChoice()
    if task_of(source) == "translation":
        folder = named or choice.data or (None if choice.source_file else choice.demo)
        if folder is None:
            return choice.read("translation"), True
        used = (choice.split_read or "val") if named is None else None
        others = (name for name in ("test", "dev", "val") if name != used and has_split(Path(folder), name))
        split = next(others, used)
        text = TextChoice(data=folder, split=split, langs=choice.langs, pairs=choice.pairs)
        return text.read("translation"), split == used
    if named is not None:
        choice = TextChoice(files=(named,))

    def read(choice: TextChoice) -> tuple[Dataset, PlainText]:
        data = choice.read("lm") if source.family is None else measured_text(source, choice, "`check_text`")
        assert isinstance(data.text, PlainText)
        return data, data.text

    data, plain = read(choice)
    if named is None and choice.max_sentences is not None:
        rest = read(choice.model_copy(update={"max_sentences": None}))[1].texts[len(plain) :]
        if rest:
            return replace(data, text=PlainText(plain.files, rest)), False
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
