"""From text to the examples of a task, by the model's tokenizer.

Texts of any length for causal language models become windows of the context in which each token is predicted once.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prunecli.errors import CheckpointError, DataError, UnsupportedModelError, UsageError
from prunecli.modules.logits import vocabulary_size
from prunecli.modules.pooling import Pooling
from prunecli.progress import Progress, silent
from prunecli.running.examples import IGNORED, Batch, Examples, Sequences, TokenExamples
from prunecli.text.choice import TASKS, TaskName, has_decoder, scores_texts, sees_ahead
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import LabelledText, label_ids
from prunecli.text.tokens import SEAMLESS, encode, language_id, languages, require_rows, tokenized

MIXING = (
    "convbert",
    "cpmant",
    "fnet",
    "funnel",
    "mobilebert",
    "nystromformer",
    "prophetnet",
    "xlnet",
    "yoso",
)
"""Types that mix padding into texts, whatever the mask: by convolutions, Fourier transforms, pooled attentions, say.

XLNet tells a text's class from the last position of the batch.
"""
AT_ONCE = 1 << 12
"""Lines that are tokenised between two reports."""


def require_task(model: Any, task: TaskName) -> None:
    """Refuse a model without the head that a task needs.

    Raises:
        UnsupportedModelError: the model has another head, or none.
        CheckpointError: a value of config.json that cannot be.
    """
    _require_sound(model.config)
    name = type(model).__name__
    is_pair = has_decoder(name, is_pair=bool(getattr(model.config, "is_encoder_decoder", False)))
    generates = bool(model.can_generate())
    reads_text = not is_pair or model.main_input_name == "input_ids"
    able = {
        "translation": generates and is_pair and reads_text,
        "classification": name.endswith("ForSequenceClassification") and not scores_texts(model.config),
        "mlm": name.endswith(("ForMaskedLM", "WithLMHeadModel")),  # the latter: XLM, FlauBERT
        "lm": generates and not is_pair and not sees_ahead(model.config),
        "embedding": not is_pair,
    }
    if not able[task]:
        others = [other for other in TASKS if able[other]]
        lacking = (
            "an encoder with a decoder, so that a text has no vector"
            if task == "embedding"
            else "a head that sees the tokens that it is to predict"
            if task == "lm" and generates and not is_pair
            else "no head that chooses one of several classes"
            if task == "classification"
            else "no head for it"
            if reads_text
            else f"{model.main_input_name} in the place of text"
        )
        raise UnsupportedModelError(
            f"{task}: the model is a {name}, which has {lacking}",
            f"It can do: {', '.join(others)}." if others else "Name a checkpoint with the head of the task.",
        )


def _require_sound(config: Any) -> None:
    """Refuse tokens with a part of their own that no row of the table stands for, and dropouts that cannot be."""
    # Decoders of two stacks begin with bos_token_id. -1: none.
    begins = {"decoder_start_token_id": 0, "bos_token_id": -1} if config.is_encoder_decoder else {}
    for key, least in {"pad_token_id": -1, **begins}.items():
        size, value = vocabulary_size(config, output=key in begins), getattr(config, key, None)
        if size is None or value is None:
            continue
        if type(value) is not int or not least <= value < size:
            raise CheckpointError(
                f"config.json: {key} is {value!r}; the model has the tokens 0 to {size - 1}",
                "Correct the value.",
            )
    for key, rate in vars(config).items():
        if "drop" in key and isinstance(rate, (int, float)) and not 0 <= rate <= 1:
            raise CheckpointError(
                f"config.json: {key} is {rate}, not a number from 0 to 1", "Correct the value."
            )


def padding_id(model: Any, tokenizer: Any) -> int:
    """The id that fills up rows; any would do, since it is masked, where neither model nor tokenizer has one."""
    config = model.config.get_text_config()  # of a model of text and images, that of its language model
    size = vocabulary_size(config)
    for value in (getattr(config, "pad_token_id", None), tokenizer.pad_token_id, tokenizer.eos_token_id):
        # -1 stands for none in some configs, and of a token that was added to a tokenizer alone there is no row
        if isinstance(value, int) and value >= 0 and (size is None or value < size):
            return value
    return 0


def filling(model: Any, tokenizer: Any) -> tuple[int, bool]:
    """`padding_id`, and whether padding changes what transformers' class computes for the other tokens.

    A sparse attention that keeps the best `index_topk` keys breaks ties by the number of keys, padding among them.
    """
    config = model.config.get_text_config()
    is_mixed = getattr(config, "index_topk", None) is not None or config.model_type in MIXING
    return padding_id(model, tokenizer), is_mixed


def encoded(tokenizer: Any, model: Any, texts: Sequence[str], **options: Any) -> list[list[int]]:
    """Token ids of each text, as the tokenizer makes them; `options` as it takes them.

    Raises:
        CheckpointError: the tokenizer does not work, or gives ids that the model has no tokens for.
    """
    # Longer than the model takes is no news here.
    rows = [list(row) for row in tokenized(tokenizer, list(texts), verbose=False, **options)["input_ids"]]
    require_tokens(tokenizer, model, rows)
    return rows


def require_tokens(tokenizer: Any, model: Any, rows: Sequence[Sequence[int]]) -> None:
    """`require_rows` of the table that the model reads tokens from."""
    require_rows(tokenizer, rows, vocabulary_size(model.config))


def translation_examples(
    tokenizer: Any,
    model: Any,
    text: ParallelText,
    pairs: Sequence[tuple[str, str]],
    progress: Progress = silent,
    *,
    skip_blank: bool = False,
) -> TokenExamples:
    """The sentences of all `pairs`, one pair after another.

    Sentences that are longer than the model's positions are cut. Languages are marked as `collect-gates` does it,
    where the tokenizer knows languages. The decoder's inputs are the model's own shift of the labels.

    Args:
        skip_blank: leave out lines that are blank on either side.

    Raises:
        UnsupportedModelError: not an encoder with a decoder.
        DataError: the tokenizer lacks a language, or every line is left out.
    """
    require_task(model, "translation")
    # Each line once for each (language, whether as a target), however many pairs it is in.
    rows: dict[tuple[str, bool], list[list[int]]] = {
        role: [] for source, target in pairs for role in ((source, False), (target, True))
    }
    with progress("tokenising", len(rows) * len(text), "lines") as advance:
        for (name, as_target), ids in rows.items():
            positions = max_positions(model.config, output=as_target)
            options = {
                "max_length": None if positions is None else positions - 1,
                "vocabulary": vocabulary_size(model.config, output=as_target),
            }
            for start in range(0, len(text), AT_ONCE):
                lines = text.sentences[name][start : start + AT_ONCE]
                ids += encode(tokenizer, lines, name, as_target=as_target, **options)
                advance(len(lines))
    sources: list[list[int]] = []
    targets: list[list[int]] = []
    for source, target in pairs:
        for number, lines in enumerate(zip(text.sentences[source], text.sentences[target], strict=True)):
            if not skip_blank or all(line.strip() for line in lines):
                sources.append(rows[source, False][number])
                targets.append(rows[target, True][number])
    if skip_blank and not sources:
        raise DataError(f"{text.split}: every line is blank in one of the languages", "Give other text.")
    shift = partial(decoder_inputs, model)
    return TokenExamples(Sequences(sources), Sequences(targets), *filling(model, tokenizer), shift=shift)


def decoder_inputs(model: Any, labels: Tensor) -> Tensor:
    """The model's own shift of `labels` `[B, T]` to the right, as its `forward` would make it.

    Raises:
        CheckpointError: the config names no token to begin with, or none for padding, which every shift replaces.
    """
    start, padding = (getattr(model.config, key, None) for key in ("decoder_start_token_id", "pad_token_id"))
    labels = labels.clone()  # FSMT's shift writes to them
    try:
        if hasattr(model, "prepare_decoder_input_ids_from_labels"):
            shifted: Tensor = model.prepare_decoder_input_ids_from_labels(labels=labels)
            return shifted
        for base in type(model).__mro__:
            shift = getattr(sys.modules.get(base.__module__), "shift_tokens_right", None)
            if shift is not None:
                inputs: Tensor = shift(labels, padding, start)
                return inputs
    except (AttributeError, TypeError, ValueError) as error:  # T5Gemma has these tokens elsewhere
        key = "decoder_start_token_id" if start is None else "pad_token_id"
        raise CheckpointError(
            f"config.json: no {key}, which the decoder's inputs are made with", "Add it."
        ) from error
    raise UnsupportedModelError(f"{type(model).__name__} does not say how its decoder's inputs are made")


def output_language(tokenizer: Any, model: Any, language: str) -> dict[str, Any]:
    """Argument of `generate` by which outputs are in `language`; nothing where the tokenizer knows no languages.

    Raises:
        DataError: the tokenizer has language tokens, but not this one.
        CheckpointError: the model's table has no row for it.
    """
    if not languages(tokenizer):
        return {}
    number = language_id(tokenizer, language, vocabulary_size(model.config))
    if type(tokenizer).__name__ == SEAMLESS:  # the model's own `generate`
        return {"tgt_lang": language}
    # The shift of mBART-25 and PLBart puts the language, the last token of a text, at the beginning.
    inputs = decoder_inputs(model, torch.tensor(encode(tokenizer, [""], language, as_target=True)))
    return {"decoder_start_token_id" if inputs[0, 0] == number else "forced_bos_token_id": number}


def labelled_examples(tokenizer: Any, model: Any, text: LabelledText) -> TokenExamples:
    """Texts, or pairs of them, with their classes; what is longer than the model's positions is cut.

    Raises:
        UnsupportedModelError: the model has no head that chooses one of several classes.
        DataError: a label that the model does not know.
    """
    require_task(model, "classification")
    classes = label_ids(text, model.config.id2label)
    options = {"truncation": True, "max_length": context_length(model, tokenizer), "verbose": False}
    seconds = None if text.seconds is None else list(text.seconds)
    ids = tokenized(tokenizer, list(text.texts), seconds, **options)
    require_tokens(tokenizer, model, ids["input_ids"])
    return TokenExamples(
        Sequences(ids["input_ids"]),
        torch.tensor(classes),
        *filling(model, tokenizer),
        types=Sequences(ids["token_type_ids"]) if "token_type_ids" in ids else None,
        # Decoders look for the last token before the padding, and must know what padding is.
        max_rows=1 if getattr(model.config.get_text_config(), "pad_token_id", None) is None else None,
    )


def text_examples(
    tokenizer: Any,
    model: Any,
    texts: Sequence[str],
    context: int | None = None,
    *,
    skip_empty: bool = True,
    whole: bool = False,
) -> TokenExamples:
    """Texts for a model with one stack, cut to `window_length`; a token's label is the token.

    Args:
        skip_empty: leave out texts without a token.
        whole: make an example of each stretch of so many tokens, not of a text's first one alone.

    Raises:
        UsageError: the model has fewer positions than `context`.
        DataError: a text without a token, or no text with one.
    """
    longest = window_length(model, tokenizer, context)
    cut = {} if whole else {"truncation": True, "max_length": longest}
    rows = encoded(tokenizer, model, texts, **cut)
    empty = [number for number, row in enumerate(rows) if not row]
    if empty and not skip_empty:
        raise DataError(f"text {empty[0] + 1:,} ({texts[empty[0]]!r}) has no token", "Leave it out.")
    if len(empty) == len(rows):
        raise DataError("no text has a token", "Give other text.")
    ids = Sequences([row[i : i + longest] for row in rows for i in range(0, len(row), longest)])
    return TokenExamples(ids, ids, *filling(model, tokenizer))


def embedding_examples(
    tokenizer: Any, model: Any, pooling: Pooling, texts: Sequence[str], context: int | None
) -> TokenExamples:
    """Texts whose vectors are made; each counts once, so that the class 0 of all stands for no label.

    Args:
        pooling: says what is put before texts, whether they are lower-cased, and where they are cut.
        context: tokens that a text is cut to instead.

    Raises:
        UnsupportedModelError: an encoder with a decoder.
        UsageError: the model has fewer positions than `context`.
        DataError: a text without a token.
    """
    require_task(model, "embedding")
    if context is None and pooling.max_tokens is not None:
        context = min(pooling.max_tokens, window_length(model, tokenizer))
    given = [f"{pooling.prompt}{text}" for text in texts]
    given = [text.lower() for text in given] if pooling.lower_case else given
    examples = text_examples(tokenizer, model, given, context, skip_empty=False)
    return replace(examples, labels=torch.zeros(len(texts), dtype=torch.int64))


LENGTH_FACTOR = 3
LENGTH_MARGIN = 50
"""An output ends at 3 x source tokens + 50 at the latest: generous also where a script costs more tokens."""
DEFAULT_CONTEXT = 2048
"""Tokens of a window at most where none are asked for: one of all of a model's positions may not fit in memory."""


def length_limit(source_tokens: int, max_positions: int | None) -> int:
    """New tokens at most for a source of so many tokens: min(3 x source + 50, positions of the model - 1)."""
    limit = LENGTH_FACTOR * source_tokens + LENGTH_MARGIN
    return limit if max_positions is None else min(limit, max_positions - 1)


def max_positions(config: Any, *, output: bool = False) -> int | None:
    """Tokens that the model of `config` has positions for, or None where it does not say.

    Args:
        output: of those that it writes, of which LED has fewer.
    """
    of_stack = f"max_{'decoder' if output else 'encoder'}_position_embeddings"
    stated = (getattr(config, key, None) for key in ("max_position_embeddings", of_stack, "max_seq_len"))
    value = next((one for one in stated if one is not None), None)
    return int(value) if isinstance(value, int) and value > 1 else None


def position_count(model: Any) -> int | None:
    """Tokens that the model has positions for, or None where nothing bounds them."""
    bound = max_positions(model.config)
    embeddings = getattr(getattr(model, "base_model", None), "embeddings", None)
    positions: Any = getattr(embeddings, "position_embeddings", None)
    if getattr(positions, "padding_idx", None) is not None:
        # RoBERTa and its kin count positions from behind the padding's.
        rows = len(positions.weight) - int(positions.padding_idx) - 1
        return rows if bound is None else min(bound, rows)
    return bound


def context_length(model: Any, tokenizer: Any) -> int | None:
    """Tokens that the model has positions for and its tokenizer allows, or None where nothing bounds them.

    Raises:
        CheckpointError: what the tokenizer allows is no number.
    """
    bound = position_count(model)
    # A tokenizer that knows no bound says so with a number beyond all bounds.
    allowed = getattr(tokenizer, "model_max_length", 1 << 30)
    if not isinstance(allowed, int | float) or not allowed >= 0:
        raise CheckpointError(
            f"{tokenizer.name_or_path}: the tokenizer's model_max_length is {allowed!r}, not a number of tokens",
            "Correct it in tokenizer_config.json.",
        )
    if allowed >= 1 << 30:
        return bound
    return int(allowed) if bound is None else min(bound, int(allowed))


def window_length(model: Any, tokenizer: Any, asked: int | None = None) -> int:
    """Tokens of the longest window of a text: `asked`, or else those that fit, `DEFAULT_CONTEXT` at most.

    Raises:
        UsageError: the model has fewer positions than `asked`.
    """
    if asked is None:
        return min(context_length(model, tokenizer) or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    positions = position_count(model)
    if positions is not None and asked > positions:
        raise UsageError(
            f"`context={asked}`: the model has {positions:,} positions", f"Give at most {positions:,}."
        )
    return asked


@dataclass(frozen=True)
class Window:
    """A stretch of a text that fits the model's context.

    Attributes:
        text: number of the text.
        ids: its tokens.
        counted: so many of the last of them are predicted; the others were, by earlier windows, or start the text.
    """

    text: int
    ids: tuple[int, ...]
    counted: int

    @property
    def labels(self) -> list[int]:
        """For each token the next one if it is counted, else -100."""
        before = len(self.ids) - self.counted
        return [IGNORED] * (before - 1) + [*self.ids[before:], IGNORED]


def lm_windows(
    tokenizer: Any,
    model: Any,
    texts: Sequence[str],
    *,
    context: int | None = None,
    stride: int | None = None,
) -> list[Window]:
    """Cut texts to windows in which every token is predicted once.

    The first token is predicted from the tokenizer's start token, or its end token where it has none; with neither it
    is not counted. A window begins `stride` tokens after the one before it. By default windows overlap by the one
    token from which the first new one is predicted, so that each predicts context - 1 tokens; with a smaller `stride`
    a counted token that is not in the first window is predicted from context - stride tokens or more.

    Args:
        context: tokens of a window at most; default: see `window_length`.
        stride: default: context - 1.

    Raises:
        UnsupportedModelError: not a causal language model.
        UsageError: the model has fewer positions than `context`; `stride` is not from 1 to context - 1.
        DataError: there is no token to predict.
    """
    require_task(model, "lm")
    length = window_length(model, tokenizer, context)
    step = length - 1 if stride is None else stride
    if not 1 <= step < length:
        raise UsageError(
            f"`stride={step}`: a window has {length:,} tokens",
            "Windows must overlap: a stride is from 1 to the window's tokens - 1.",
        )
    windows = []
    for number, row in enumerate(encoded(tokenizer, model, texts)):
        ids, done = _started(tokenizer, model, row), 1  # nothing comes before the first token
        for begin in range(0, len(ids), step):
            end = min(begin + length, len(ids))
            if end > done:
                windows.append(Window(number, tuple(ids[begin:end]), end - done))
                done = end
    if not windows:
        raise DataError("the text has no token to predict")
    return windows


def window_examples(windows: Sequence[Window], pad_id: int, equal: bool = False) -> TokenExamples:
    """Windows as examples, each with the tokens that are counted in it."""
    ids, labels = ([*window.ids] for window in windows), (window.labels for window in windows)
    return TokenExamples(Sequences([*ids]), Sequences([*labels]), pad_id, equal)


def packed_examples(
    tokenizer: Any, model: Any, texts: Sequence[str], context: int | None = None, *, apart: bool = False
) -> TokenExamples:
    """Texts, each ended by the end token, cut into windows in which each token is predicted once.

    Texts follow one another: a window may hold several texts and parts of them, and attention and positions run on from
    one to the next within it, as in the training of GPT-2 (and in transformers' run_clm). Where the tokenizer has no
    end token there is none.

    Args:
        context: tokens of a window; default: see `window_length`.
        apart: each text has windows of its own.

    Raises:
        UnsupportedModelError: not a causal language model.
        UsageError: the model has fewer positions than `context`.
        DataError: there is no token to predict.
    """
    require_task(model, "lm")
    length, end = window_length(model, tokenizer, context), tokenizer.eos_token_id
    if end is not None:
        require_tokens(tokenizer, model, [[end]])
    rows = [
        ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in encoded(tokenizer, model, texts)
    ]
    streams = rows if apart else [[*chain.from_iterable(rows)]]
    inputs, labels = [], []
    for stream in streams:
        ids = _started(tokenizer, model, stream)
        for start in range(0, len(ids) - 1, length):
            inputs.append(ids[start : min(start + length, len(ids) - 1)])
            labels.append(ids[start + 1 : start + 1 + length])
    if not inputs:
        raise DataError("there is no token to predict")
    return TokenExamples(Sequences(inputs), Sequences(labels), *filling(model, tokenizer))


def _started(tokenizer: Any, model: Any, ids: list[int]) -> list[int]:
    """Tokens behind the one that a text's first token is predicted from, where the tokenizer has one."""
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is None or ids[:1] == [start]:
        return ids
    require_tokens(tokenizer, model, [[start]])
    return [start, *ids]


MASK_PROBABILITY = 0.15
MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Of the chosen tokens: so many become the mask token, so many a random one; the rest stays."""


@dataclass
class MaskedExamples(Examples):
    """Texts with some of their tokens hidden, others in each epoch (RoBERTa, 1907.11692, 4.1).

    Each token that is not a special one is chosen with a probability of 15 %, at least one of a text; of the chosen
    ones 80 % become the mask token, 10 % a random token, 10 % stay (BERT, 1810.04805, 3.1).

    Attributes:
        ids: of each text.
        numbers: of each text; with seed and epoch they determine what is hidden in it.
        special: `[tokens]` bool: those that are never hidden.
        vocabulary: the others.
        mask_id: the mask token.
    """

    ids: Sequences
    numbers: Sequence[int]
    special: NDArray[np.bool_]
    vocabulary: NDArray[np.int64]
    mask_id: int
    seed: int
    pad_id: int
    equal: bool = False
    epoch: int = 0

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        return [(length, length) for length in self.ids.lengths]

    def set_epoch(self, epoch: int) -> None:
        """See `Examples`."""
        self.epoch = epoch

    def batch(self, rows: Sequence[int]) -> Batch:
        """See `Examples`."""
        inputs = self.ids.inputs(rows, self.pad_id)
        ids = inputs["input_ids"]
        labels = torch.full_like(ids, IGNORED)
        for line, row in enumerate(rows):
            positions, tokens = self._hidden(row)
            labels[line, positions] = ids[line, positions]
            ids[line, positions] = torch.tensor(tokens)
        return Batch(inputs, labels, tuple(self.numbers[row] for row in rows))

    def _hidden(self, row: int) -> tuple[list[int], list[int]]:
        """Positions of a text's hidden tokens, and what stands there instead."""
        # An epoch of 0 changes no draw.
        random = np.random.default_rng((self.seed, self.numbers[row], self.epoch))
        ids = self.ids[row]
        words = np.flatnonzero(~self.special[ids])
        chosen = words[random.random(len(words)) < MASK_PROBABILITY].tolist()
        chosen = chosen or [int(words[random.integers(len(words))])]
        tokens = []
        for position in chosen:
            draw, token = random.random(), int(ids[position])
            if draw < MASKED_SHARE:
                token = self.mask_id
            elif draw < MASKED_SHARE + RANDOM_SHARE:
                token = int(self.vocabulary[random.integers(len(self.vocabulary))])
            tokens.append(token)
        return chosen, tokens


def mlm_examples(
    tokenizer: Any, model: Any, texts: Sequence[str], *, context: int | None = None, seed: int = 0
) -> MaskedExamples:
    """Texts, cut to `window_length`; those without a token to hide are left out.

    Args:
        context: tokens of a window; default: see `window_length`.

    Raises:
        UnsupportedModelError: the model is not a masked language model, or its tokenizer has no mask token.
        UsageError: the model has fewer positions than `context`.
        DataError: no text has a token to hide.
    """
    require_task(model, "mlm")
    if tokenizer.mask_token_id is None:
        raise UnsupportedModelError("mlm: the tokenizer has no mask token")
    require_tokens(tokenizer, model, [[tokenizer.mask_token_id]])
    special = np.zeros(max(len(tokenizer), 1 + max(tokenizer.get_vocab().values())), np.bool_)
    special[sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})] = True
    options = {"truncation": True, "max_length": window_length(model, tokenizer, context)}
    rows = encoded(tokenizer, model, texts, **options)
    numbers = [number for number, ids in enumerate(rows) if not special[np.asarray(ids, np.int64)].all()]
    if not numbers:
        raise DataError("no text has a token that could be hidden")
    size = vocabulary_size(model.config) or len(tokenizer)
    return MaskedExamples(
        Sequences([rows[number] for number in numbers]),
        numbers,
        special,
        np.flatnonzero(~special[: min(len(tokenizer), size)]),
        tokenizer.mask_token_id,
        seed,
        *filling(model, tokenizer),
    )
