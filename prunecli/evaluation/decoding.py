"""Beam-search translation of many sentences, in length-bucketed batches."""

import inspect
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from prunecli.evaluation.on_text import DecodingOptions as DecodingOptions
from prunecli.modules.logits import vocabulary_size
from prunecli.private import reorders_own_cache
from prunecli.processes import ALONE, ProcessGroup
from prunecli.running.encoding import filling, length_limit, max_positions, output_language, require_task
from prunecli.running.runner import Advance, ignored
from prunecli.text.batching import length_bucketed, pad
from prunecli.text.tokens import Tokenizer, encode

Rows = list[list[int]]
"""Ids of tokens, or positions of sentences, of each batch or example."""


class Translation(NamedTuple):
    """One output.

    Attributes:
        text: without special tokens.
        finished: the model ended it, not the length limit.
    """

    text: str
    finished: bool


def batched_search(
    model: Any,
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    pair: tuple[str, str],
    options: DecodingOptions,
) -> tuple[Rows, Callable[[Sequence[int]], list[Translation]]]:
    """Batches of sentences, and the function that translates one of them.

    Batches hold sources of like lengths, the longest first; the length limit of a batch is that of its
    longest source. Sources longer than the model's positions are cut.

    Returns:
        Positions of the sentences of each batch; such positions -> a translation of each.

    Raises:
        DataError: the tokenizer has language tokens, but lacks one of `pair`.
        CheckpointError: the id of the target language is none of the vocabulary of the model.
    """

    longest, positions = max_positions(model.config), max_positions(model.config, output=True)
    vocabulary = vocabulary_size(model.config)
    sources = encode(tokenizer, sentences, pair[0], max_length=longest, vocabulary=vocabulary)
    padding, equal = filling(model, tokenizer)
    settings = output_language(tokenizer, model, pair[1])

    def search(batch: Sequence[int]) -> list[Translation]:
        limit = options.max_new_tokens or length_limit(len(sources[batch[0]]), positions)
        made = generate(model, [sources[i] for i in batch], padding, options.beam, limit, **settings)
        texts, ends = tokenizer.batch_decode(made, skip_special_tokens=True), end_ids(model, tokenizer)
        # The first id starts the decoder; in NLLB it is the end token itself. BART puts one where the limit is.
        return [
            Translation(text.strip(), not ends.isdisjoint(ids[1:limit]))
            for text, ids in zip(texts, made, strict=True)
        ]

    return length_bucketed([*map(len, sources)], options.batch_tokens, equal=equal), search


def translate(
    model: Any,
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    pair: tuple[str, str],
    options: DecodingOptions,
    advance: Advance = ignored,
    process_group: ProcessGroup = ALONE,
) -> list[Translation]:
    """Translate `sentences` from `pair[0]` to `pair[1]`; of several processes each translates some of the batches.

    Args:
        model: in evaluation mode, on its device.
        advance: called with the number of sentences of each finished batch, times the processes.
        process_group: all of them call this, and have the same result.

    Returns:
        One translation per sentence, in the order of `sentences`.

    Raises:
        DataError: the tokenizer lacks a language.
    """
    done: list[tuple[int, Translation]] = []
    batches, search = batched_search(model, tokenizer, sentences, pair, options)
    for batch in process_group.share(batches):
        done += zip(batch, search(batch), strict=True)
        advance(len(batch) * process_group.world_size)
    return [made for _, made in sorted(chain(*process_group.all_gather(done)))]


def generate(
    model: Any, sources: Sequence[Sequence[int]], pad_id: int, beam: int, limit: int, **settings: Any
) -> Rows:
    """Search a batch by the model's `generate`, whatever the checkpoint's own defaults.

    A decoder alone goes on where its prompt ends, so that padding is before the prompts.

    Args:
        limit: new tokens at most.
        settings: further arguments of `generate`.

    Returns:
        Ids of each best hypothesis, the decoder's start included.

    Raises:
        UnsupportedModelError: it generates no text, or from sound.
    """

    is_pair = getattr(model.config, "is_encoder_decoder", False)
    require_task(model, "translation" if is_pair else "lm")
    ids, mask = pad(sources, pad_id, left=not is_pair)
    with torch.inference_mode():
        outputs = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            num_beams=beam,
            do_sample=False,
            max_length=None,
            max_new_tokens=limit,
            num_return_sequences=1,
            return_dict_in_generate=False,
            **beam_cache(model),
            **settings,
        )
    rows: Rows = outputs.tolist()
    return rows


def beam_cache(model: Any) -> dict[str, Any]:
    """Argument of one `generate`: a cache that does not reorder the keys of cross-attention with the beams.

    The beams of a sentence share its source: reordering would copy the whole cache at each step for nothing. Nothing
    for models that are not an encoder with a decoder.
    """
    if not getattr(model.config, "is_encoder_decoder", False) or reorders_own_cache(model):
        return {}
    from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin

    # Its name since transformers 5.24, and before.
    is_new = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    made = EncoderDecoderCache(DynamicCache(), DynamicCache())
    made.reorder_cache = made.self_attention_cache.reorder_cache
    return {"cache" if is_new else "past_key_values": made}


def end_ids(model: Any, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end an output; empty where neither the model nor its tokenizer has one."""
    value = model.generation_config.eos_token_id
    if value is None:
        value = tokenizer.eos_token_id
    return set(value) if isinstance(value, list | tuple) else {value} - {None}
