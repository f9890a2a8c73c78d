"""What `bench-latency` times of each task.

| task | timed | phases |
| --- | --- | --- |
| translation | decoding of sentences to one length | |
| lm | reading of a prompt; then one token after another, with the cache | prefill, decode |
| classification, mlm | one pass over a batch of examples | |
| embedding | the same, without a head that the model has, and the pooling | |
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prunecli.errors import DataError, UnsupportedModelError, UsageError
from prunecli.evaluation.decoding import generate
from prunecli.evaluation.passes import classified, embedded, masked, without_weights
from prunecli.evaluation.workload import Phase, Workload, finished_at
from prunecli.model.checkpoint import Checkpoint
from prunecli.running.lengths import max_positions, position_count, vocabulary_size
from prunecli.text.choice import Dataset
from prunecli.text.labelled import LabelledText
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import PlainText, bounded
from prunecli.text.tokens import encode, language_id, languages, load_tokenizer

PROMPT = 128
"""Tokens of a prompt that is cut out of a document where no `context` is given."""


@dataclass(frozen=True)
class Decoding(Workload):
    """Sentences that are decoded to one length.

    Attributes:
        forced_id: first output token (the target language), or None.
        new_tokens: of each output.
    """

    forced_id: int | None
    new_tokens: int

    @property
    def tokens(self) -> dict[Phase, int]:
        """See `Workload`."""
        return {None: len(self) * self.new_tokens}

    def run(self, model: Any, beam: int) -> dict[Phase, float]:
        """See `Workload`."""
        start = time.perf_counter()
        decode(model, self.rows, beam, self.new_tokens, self.pad_id, self.forced_id)
        return {None: time.perf_counter() - start}


@dataclass(frozen=True)
class Continuation(Workload):
    """Prompts of a language model, each continued by `new_tokens` tokens with the cache of keys and values.

    The prefill is the prompt's pass, which gives the first new token; the decoding is the `new_tokens` passes after it,
    of one token each.
    """

    new_tokens: int

    @property
    def tokens(self) -> dict[Phase, int]:
        """See `Workload`."""
        return {"prefill": sum(map(len, self.rows)), "decode": len(self) * self.new_tokens}

    def run(self, model: Any, beam: int) -> dict[Phase, float]:
        """See `Workload`."""
        import torch
        from transformers import StoppingCriteriaList

        times = [time.perf_counter()]

        def note_the_first_token(ids: Any, _scores: Any, **_: Any) -> Any:
            if len(times) == 1:
                times.append(finished_at(model))
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        count = self.new_tokens + 1
        watch = StoppingCriteriaList([note_the_first_token])
        endless = _without_an_end(model, count)
        generate(model, self.rows, self.pad_id, beam, count, stopping_criteria=watch, **endless)
        start, first, end = *times, finished_at(model)
        return {"prefill": first - start, "decode": end - first}


def decode(
    model: Any,
    sources: Sequence[Sequence[int]],
    beam: int,
    new_tokens: int,
    pad_id: int,
    forced_id: int | None,
) -> list[list[int]]:
    """Exactly `new_tokens` tokens for each of `sources`, one batch, after the decoder's start."""
    settings = _without_an_end(model, new_tokens)
    if forced_id is not None:
        settings["forced_bos_token_id"] = forced_id
    return generate(model, sources, pad_id, beam, new_tokens, **settings)


def _without_an_end(model: Any, new_tokens: int) -> dict[str, Any]:
    """Settings of `generate` that hold the end of a text back for all of so many tokens.

    Its own `min_new_tokens` looks the end up among all tokens of the vocabulary at every step: at batch 1 as long as a
    layer takes.
    """
    settings, ends = model.generation_config, model.generation_config.eos_token_id
    if ends is None or settings.forced_eos_token_id is not None:
        return {"min_new_tokens": new_tokens}
    from transformers import LogitsProcessorList

    columns = list(ends) if isinstance(ends, list | tuple) else [ends]

    def hold_back(_ids: Any, scores: Any) -> Any:
        for column in columns:
            scores[:, column] = -float("inf")
        return scores

    return {"logits_processor": LogitsProcessorList([hold_back])}


def workload(checkpoint: Checkpoint, data: Dataset, count: int, new_tokens: int) -> Workload:
    """What is timed of a checkpoint: the first `count` examples of `data`, of translation those of its first pair.

    Raises:
        UnsupportedModelError: the model has no head for the task.
        UsageError: more tokens than the model has positions.
        DataError: fewer examples than `count`, or some that the model cannot read.
    """
    text = data.text
    if data.task == "embedding":
        return embedded(checkpoint, data, count)
    if isinstance(text, ParallelText):
        return decoding(checkpoint, text.first(count).sentences[data.pairs[0][0]], data.pairs[0], new_tokens)
    model, tokenizer = without_weights(checkpoint), load_tokenizer(checkpoint.path)
    if isinstance(text, LabelledText):
        return classified(checkpoint, model, tokenizer, text.first(count))
    if data.task == "lm":
        return _continued(checkpoint, model, tokenizer, text, data.context, count, new_tokens)
    return masked(model, tokenizer, text.first(count), data.context)


def decoding(
    checkpoint: Checkpoint, sentences: Sequence[str], pair: tuple[str, str], new_tokens: int
) -> Decoding:
    """Sentences that are decoded from the first to the second of `pair`.

    Raises:
        UnsupportedModelError, UsageError, DataError: as `workload`; a language that the tokenizer lacks.
    """
    config: Any = SimpleNamespace(**checkpoint.config)
    if checkpoint.architecture is not None:  # of another family, what it can do is known once it is loaded
        from prunecli.modules.building import model_class, stock_config

        stock, config = model_class(checkpoint), stock_config(checkpoint)  # with its own names and defaults
        if not stock.can_generate():
            raise UnsupportedModelError(
                f"{checkpoint.path}: the model is a {stock.__name__}, which generates no text",
                "Name a checkpoint of a translation or language model, or give the text of its task: `files` or "
                "`labelled`.",
            )
    tokenizer = load_tokenizer(checkpoint.path)
    vocabulary = vocabulary_size(config)
    forced = language_id(tokenizer, pair[1], vocabulary) if languages(tokenizer) else None
    limit = max_positions(config)  # None: nothing bounds them
    if limit is not None:
        _require_positions(checkpoint, new_tokens, limit)
    ids = encode(tokenizer, sentences, pair[0], max_length=limit, vocabulary=vocabulary)
    if limit is not None and not getattr(config, "is_encoder_decoder", False):  # shared with what follows
        ids = [row[: limit - new_tokens] for row in ids]
    pad_id = tokenizer.pad_token_id
    has_row = pad_id is not None and (vocabulary is None or pad_id < vocabulary)
    return Decoding(
        tuple(map(tuple, ids)), pad_id if has_row else 0, forced, new_tokens
    )  # masked: any will do


def _continued(
    checkpoint: Checkpoint,
    model: Any,
    tokenizer: Any,
    text: PlainText,
    context: int | None,
    count: int,
    new_tokens: int,
) -> Continuation:
    """Each line is a prompt, or each stretch of `PROMPT` tokens of a document.

    With `context` the texts stand one after another, and are cut to prompts of so many tokens.
    """
    from prunecli.running.encoding import padding_id, require_task, text_examples
    from prunecli.running.windows import packed_examples

    require_task(model, "lm")
    limit = position_count(model)
    room = (
        None if limit is None else limit - new_tokens - 1
    )  # the prefill's token, which is the first that is fed
    if room is not None and limit is not None:
        _require_positions(checkpoint, new_tokens + 1, limit)
    if room is not None and context is not None and context > room:
        raise UsageError(
            f"{checkpoint.path}: prompts of {context:,} tokens and {new_tokens + 1:,} new ones were asked for, the "
            f"model has {limit:,} positions",
            f"Ask for at most `context={room}`.",
        )
    length = context or min(PROMPT, room or PROMPT)
    texts = bounded(text.texts, length * count)
    if context is not None:
        ids = packed_examples(tokenizer, model, texts, context).ids
    elif text.whole_files:
        ids = text_examples(tokenizer, model, texts, length, whole=True).ids
    else:
        ids = text_examples(tokenizer, model, text.first(count).texts, skip_empty=False).ids
    rows = [ids[i].tolist()[:room] for i in range(len(ids)) if context in (None, len(ids[i]))][:count]
    if len(rows) < count:
        raise DataError(
            f"{', '.join(map(str, text.files))}: {len(rows):,} prompts of {length:,} tokens, {count:,} are needed",
            "Give more text, a smaller `context`, or fewer `sentences`.",
        )
    return Continuation(tuple(map(tuple, rows)), padding_id(model, tokenizer), new_tokens)


def _require_positions(checkpoint: Checkpoint, new_tokens: int, limit: int) -> None:
    if new_tokens >= limit:
        raise UsageError(
            f"{checkpoint.path}: {new_tokens} new tokens were asked for, the model has {limit} positions",
            f"Ask for at most `new_tokens={limit - 1}`.",
        )
