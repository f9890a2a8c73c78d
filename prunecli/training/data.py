"""The text of a run, and what becomes of it: examples to train on, and the validation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunecli.evaluation.decoding import DecodingOptions
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.running.encoding import labelled_examples, text_examples, translation_examples
from prunecli.running.examples import Examples
from prunecli.running.masking import mlm_examples
from prunecli.running.windows import packed_examples
from prunecli.text.choice import Text, TextChoice, columns
from prunecli.text.labelled import LabelledText
from prunecli.text.parallel import ParallelText, has_split, lines_sha256, pair_name, read_parallel
from prunecli.text.plain import PlainText
from prunecli.text.tasks import TrainingTask
from prunecli.text.tokens import Tokenizer
from prunecli.training.embedding import Lesson
from prunecli.training.loss import Objective
from prunecli.training.options import TrainingOptions
from prunecli.training.validation import Translating, Validation


@dataclass(frozen=True)
class TrainingData:
    """What is trained on.

    Attributes:
        train, valid: parallel text for translation, labelled for classification, any for embedding, plain for the
            others; no `valid`, no validation.
        pairs: the directions of translation.
    """

    task: TrainingTask
    train: Text
    valid: Text | None = None
    pairs: tuple[tuple[str, str], ...] = ()

    def describe(self) -> dict[str, Any]:
        """What the result depends on, as JSON."""
        return {
            "task": self.task,
            "train": self.train.sha256,
            "valid": None if self.valid is None else self.valid.sha256,
            **({"whole_files": self.train.whole_files} if isinstance(self.train, PlainText) else {}),
            "pairs": [pair_name(*pair) for pair in self.pairs],
        }

    def inputs(self) -> dict[str, dict[str, str]]:
        """Key of `describe` -> names of its files -> hashes of their lines."""
        named = {"train": self.train} if self.valid is None else {"train": self.train, "valid": self.valid}
        return {key: _digests(text) for key, text in named.items()}


VALID_SPLIT = "val"


def read_training_data(
    task: TrainingTask, choice: TextChoice, valid: TextChoice, say: Say = unsaid
) -> TrainingData:
    """The text that `choice` names for `task`, and that of `valid` to validate with.

    Args:
        valid: its `split`, `files`, `labelled` and `max_sentences` count; of translation without a split "val", where
            there is one.
        say: hears what is taken by default.

    Raises:
        PruneError: text that cannot be used.
    """
    train, pairs = choice.text_of(task, say)
    if isinstance(train, ParallelText):
        named = None if choice.source_file is not None else choice.data or choice.demo
        data = None if named is None else Path(named)
        if data is None or (valid.split is None and not has_split(data, VALID_SPLIT)):
            say(f"No split {VALID_SPLIT!r}, no validation: the last model is the result.")
            return TrainingData(task, train, None, pairs)
        held_out = read_parallel(data, valid.split or VALID_SPLIT, train.languages)
        return TrainingData(task, train, held_out.first(valid.max_sentences), pairs)
    if valid.labelled is None and not valid.files:
        return TrainingData(task, train)
    return TrainingData(task, train, valid.text_of(task)[0])


def _digests(text: Text) -> dict[str, str]:
    if isinstance(text, ParallelText):
        return {f"{text.split}.{name}": lines_sha256(lines) for name, lines in text.sentences.items()}
    return {", ".join(map(str, text.files)): text.sha256}


def encode_examples(
    tokenizer: Tokenizer,
    model: Any,
    data: TrainingData,
    text: Text,
    *,
    seed: int = 0,
    context: int | None = None,
    lesson: Lesson | None = None,
    progress: Progress = silent,
) -> Examples:
    """The examples of the data's task in `text`.

    Args:
        seed: of the tokens that `mlm` hides.
        context: tokens of a window of plain text; None: see `window_length`.
        lesson: of `embedding`.

    Raises:
        PruneError: the model is for another task, or the text cannot be used.
    """
    if lesson is not None:
        texts = [one for column in columns(text, data.pairs).values() for one in column]
        return lesson.examples(tokenizer, model, texts, context)
    if isinstance(text, ParallelText):
        return translation_examples(tokenizer, model, text, data.pairs, progress, skip_blank=True)
    if isinstance(text, LabelledText):
        return labelled_examples(tokenizer, model, text)
    if data.task == "feature-extraction":
        return text_examples(tokenizer, model, text.texts, context)
    if data.task == "mlm":
        return mlm_examples(tokenizer, model, text.texts, context=context, seed=seed)
    return packed_examples(tokenizer, model, text.texts, context)


def make_validation(
    tokenizer: Tokenizer,
    model: Any,
    data: TrainingData,
    options: TrainingOptions,
    objective: Objective,
    lesson: Lesson | None = None,
) -> Validation:
    """What the data's held-out text is measured by.

    Args:
        objective: whose mean is the loss.
        lesson: as in `encode_examples`.
    """
    assert data.valid is not None
    translating = None
    if options.metric == "chrf++":
        assert isinstance(data.valid, ParallelText)
        decoding = DecodingOptions(options.beam, options.batch_tokens)
        translating = Translating(data.valid, data.pairs, tokenizer, decoding)
    examples = encode_examples(tokenizer, model, data, data.valid, context=options.context, lesson=lesson)
    return Validation(examples, options.batch_tokens, objective, translating)
