"""The work that `bench-latency` times for each task.

| task | timed | phases |
| --- | --- | --- |
| translation | decoding of sentences to one length | |
| lm | reading of a prompt; then one token after another, with the cache | prefill, decode |
| classification, mlm | one pass over a batch of examples | |
| embedding | one pass without the head, and the pooling | |
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch

from prunecli.errors import DataError, UsageError
from prunecli.evaluation.decoding import generate
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.cost import Load
from prunecli.modules.building import assemble
from prunecli.modules.devices import Devices
from prunecli.modules.loading import load_for_decoding, load_model
from prunecli.modules.logits import vocabulary_size
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.running.batches import batch_vectors
from prunecli.running.encoding import (
    embedding_examples,
    labelled_examples,
    max_positions,
    output_language,
    packed_examples,
    padding_id,
    position_count,
    require_task,
    text_examples,
)
from prunecli.running.examples import TokenExamples
from prunecli.text.choice import Dataset, all_texts
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import LabelledText, PlainText, bounded
from prunecli.text.tokens import Tokenizer, encode, load_tokenizer

Phase = Literal["prefill", "decode"] | None
"""None: the whole pass, for tasks without phases."""
Times = dict[Phase, float]
"""Phase -> seconds."""
Rows = Sequence[Sequence[int]]
"""Token ids of each example."""

PROMPT = 128
"""Tokens of a prompt that is cut out of a document if no `context` is given."""


@dataclass(frozen=True)
class Workload(ABC):
    """The examples of a checkpoint, as token ids of its own tokenizer.

    Attributes:
        rows: token ids of each example, or its number.
    """

    decodes: ClassVar[bool] = True
    """Whether the model is loaded for decoding, and tokens are counted."""

    rows: Sequence[Any]

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, start: int, stop: int) -> Self:
        """Some of the examples."""
        return replace(self, rows=self.rows[start:stop])

    def load(self, path: Path | str, dtype: str, device: Devices | str, load: Load | None) -> Any:
        """Load a model for this work; see `load_model`."""
        make = load_for_decoding if self.decodes else load_model
        return make(path, device=device, dtype=dtype, load=load)

    @property
    def longest(self) -> int:
        """Most tokens of an example."""
        return max(map(len, self.rows))

    @property
    @abstractmethod
    def tokens(self) -> dict[Phase, int]:
        """Number of tokens that each phase reads, or generates, over all examples."""

    @abstractmethod
    def run(self, model: Any, beam: int) -> Times:
        """Seconds of each phase, all examples in one batch."""


@dataclass(frozen=True)
class Decoding(Workload):
    """Sentences that are decoded to one length, or prompts that are continued with the cache of keys and values.

    Attributes:
        pad_id: padding token of a batch.
        new_tokens: length of each output.
        settings: arguments of `generate` for the target language.
        has_prompts: of a language model, whose prefill is timed apart: the prompt's pass, which gives the first new
            token; the decoding is the `new_tokens` passes after it, of one token each.
    """

    pad_id: int
    new_tokens: int
    settings: Mapping[str, int] = field(default_factory=dict)
    has_prompts: bool = False

    @property
    def tokens(self) -> dict[Phase, int]:
        """See `Workload`."""
        made = len(self) * self.new_tokens
        return {"prefill": sum(map(len, self.rows)), "decode": made} if self.has_prompts else {None: made}

    def run(self, model: Any, beam: int) -> Times:
        """See `Workload`."""
        from transformers import StoppingCriteriaList

        times = [time.perf_counter()]

        def note_the_first_token(ids: Any, _scores: Any, **_: Any) -> Any:
            if len(times) == 1:
                times.append(finished_at(model))
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        watch = StoppingCriteriaList([note_the_first_token] if self.has_prompts else [])
        count = self.new_tokens + self.has_prompts
        decode(model, self.rows, beam, count, self.pad_id, stopping_criteria=watch, **self.settings)
        times.append(finished_at(model))
        spans = [end - start for start, end in pairwise(times)]
        return dict(zip(self.tokens, spans, strict=True))


@dataclass(frozen=True)
class Passes(Workload):
    """Examples that go through the model once; `rows` are their numbers.

    Attributes:
        examples: all examples of the run.
        pooling: how texts become vectors; None: the model's own output.
    """

    decodes: ClassVar[bool] = False

    examples: TokenExamples
    pooling: Pooling | None

    @property
    def longest(self) -> int:
        """See `Workload`."""
        return max(self.examples.ids.lengths)

    @property
    def tokens(self) -> dict[Phase, int]:
        """See `Workload`."""
        return {None: sum(len(self.examples.ids[row]) for row in self.rows)}

    def run(self, model: Any, _beam: int) -> Times:
        """See `Workload`."""
        batch = self.examples.batch(self.rows)
        finished_at(model)
        start = time.perf_counter()
        with torch.inference_mode():
            if self.pooling is None:
                model(**batch.arguments(model))
            else:
                batch_vectors(model, self.pooling, batch)
        return {None: finished_at(model) - start}


def finished_at(model: Any) -> float:
    """The time at which the device has finished its work."""

    getattr(torch, model.device.type).synchronize()
    return time.perf_counter()


def decode(
    model: Any, sources: Rows, beam: int, new_tokens: int, pad_id: int, **more: Any
) -> list[list[int]]:
    """Exactly `new_tokens` tokens for each of `sources`, one batch, after the decoder's start or the prompt."""
    from transformers import LogitsProcessorList

    ends = model.generation_config.eos_token_id

    def hold_back(_ids: Any, scores: Any) -> Any:
        for end in ends if isinstance(ends, list | tuple) else [ends]:
            scores[:, end] = -float("inf")
        return scores

    if ends is None or model.generation_config.forced_eos_token_id is not None:
        more["min_new_tokens"] = new_tokens
    else:  # `min_new_tokens` searches the vocabulary for the end at every step: at batch 1 as long as a layer takes
        more["logits_processor"] = LogitsProcessorList([hold_back])
    return generate(model, sources, pad_id, beam, new_tokens, **more)


def workload(checkpoint: Checkpoint, data: Dataset, count: int, new_tokens: int) -> Workload:
    """The first `count` examples of `data` (for translation of its first pair), as a checkpoint reads them.

    Raises:
        UnsupportedModelError: the model has no head for the task.
        UsageError: more tokens than the model has positions, or padding that it does not have.
        DataError: fewer examples than `count`, or some that the model cannot read.
    """

    text, directory = data.text, checkpoint.path
    if isinstance(text, ParallelText) and data.task == "translation":
        sentences = text.first(count).sentences[data.pairs[0][0]]
        return decoding(checkpoint, sentences, data.pairs[0], new_tokens)
    # The class is asked about the task.
    model = assemble(checkpoint, torch.float32)
    tokenizer = load_tokenizer(directory)
    pooling = None
    if data.task == "embedding":
        texts = all_texts(text.first(count), data.pairs)[:count]
        pooling = read_pooling(directory)
        examples = embedding_examples(tokenizer, model, pooling, texts, data.context)
    elif isinstance(text, LabelledText):
        examples = labelled_examples(tokenizer, model, text.first(count))
        if examples.max_rows == 1 and count > 1:
            raise UsageError(
                f"{directory}: config.json names no padding token, so the model takes one example at a time",
                "Give `batch_sizes=1` and `sentences=1`, or set pad_token_id in config.json.",
            )
    else:
        assert isinstance(text, PlainText)
        require_task(model, data.task)
        if data.task == "lm":
            return _prompts(checkpoint, model, tokenizer, text, data.context, count, new_tokens)
        examples = text_examples(tokenizer, model, text.first(count).texts, data.context, skip_empty=False)
    return Passes(range(len(examples.ids)), examples, pooling)


def _prompts(
    checkpoint: Checkpoint,
    model: Any,
    tokenizer: Tokenizer,
    text: PlainText,
    context: int | None,
    count: int,
    new_tokens: int,
) -> Decoding:
    """Each line as a prompt, or each stretch of `PROMPT` tokens of a document.

    With `context`, the texts are concatenated and cut into prompts of so many tokens.
    """
    limit, room = position_count(model), None
    if limit is not None:
        _require_positions(checkpoint, new_tokens + 1, limit)
        room = limit - new_tokens - 1  # the prefill's token is the first that is fed
        if context is not None and context > room:
            raise UsageError(
                f"{checkpoint.path}: prompts of {context:,} tokens and {new_tokens + 1:,} new ones were asked for, "
                f"the model has {limit:,} positions",
                f"Ask for at most `context={room}`.",
            )
    length = context or min(PROMPT, room or PROMPT)
    beginning = bounded(text.texts, length * count)
    if context is not None:
        ids = packed_examples(tokenizer, model, beginning, context).ids
    elif text.whole_files:
        ids = text_examples(tokenizer, model, beginning, length, whole=True).ids
    else:
        ids = text_examples(tokenizer, model, text.first(count).texts, skip_empty=False).ids
    found = map(ids.__getitem__, range(len(ids)))
    rows = [row[:room].tolist() for row in found if context in (None, len(row))][:count]
    if len(rows) < count:
        raise DataError(
            f"{', '.join(map(str, text.files))}: {len(rows):,} prompts of {length:,} tokens, {count:,} are needed",
            "Give more text, a smaller `context`, or fewer `sentences`.",
        )
    return Decoding(rows, padding_id(model, tokenizer), new_tokens, has_prompts=True)


def decoding(
    checkpoint: Checkpoint, sentences: Sequence[str], pair: tuple[str, str], new_tokens: int
) -> Decoding:
    """Sentences that are decoded from the first to the second language of `pair`.

    Raises:
        UnsupportedModelError, UsageError, DataError: as `workload`; a language that the tokenizer lacks.
    """
    model, tokenizer = assemble(checkpoint, torch.float32), load_tokenizer(checkpoint.path)
    require_task(model, "translation")
    limit = max_positions(model.config)  # None: no limit
    if limit is not None:
        _require_positions(checkpoint, new_tokens, limit)
    vocabulary = vocabulary_size(model.config)
    ids = encode(tokenizer, sentences, pair[0], max_length=limit, vocabulary=vocabulary)
    padding, settings = padding_id(model, tokenizer), output_language(tokenizer, model, pair[1])
    return Decoding(tuple(map(tuple, ids)), padding, new_tokens, settings)


def _require_positions(checkpoint: Checkpoint, new_tokens: int, limit: int) -> None:
    if new_tokens >= limit:
        raise UsageError(
            f"{checkpoint.path}: {new_tokens} new tokens were asked for, the model has {limit} positions",
            f"Ask for at most `new_tokens={limit - 1}`.",
        )
