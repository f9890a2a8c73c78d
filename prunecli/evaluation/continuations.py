"""Whether language models go on from the same prompts with the same tokens, each choosing the most probable one.

Perplexity is measured on what people wrote; here a model reads what it wrote itself, and a small divergence at each
token adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

from prunecli.errors import DataError
from prunecli.evaluation.decoding import end_ids
from prunecli.running.encoding import padding_id
from prunecli.running.lengths import position_count
from prunecli.running.runner import chunks, ignored

PROMPT = 32
"""Tokens of a prompt, halved until that is at most half of its text: few lengths, so that many run together."""
NEW_TOKENS = 64
"""Tokens of a continuation at most, where no other number is asked for."""

Ids = Sequence[int]
"""Numbers of tokens."""


@dataclass(frozen=True)
class Agreement:
    """How far one model's continuations go along with another's.

    Attributes:
        continuations: how many there are.
        continued_tokens: mean length of the first model's continuations, their end tokens included.
        tokens_until_difference: mean number of tokens before the first that differs; at most `continued_tokens`.
        equal_tokens: of all tokens of the first model the share that the other has at the same place, 0 to 1.
    """

    continuations: int
    continued_tokens: float
    tokens_until_difference: float
    equal_tokens: float


def choose_prompts(texts: Sequence[Ids], count: int) -> list[Ids]:
    """The beginnings of `count` of the texts, spread evenly over them, or of all where there are fewer.

    Raises:
        DataError: no text has two tokens.
    """
    long_enough = [ids for ids in texts if len(ids) > 1]
    if not long_enough:
        raise DataError("no text has two tokens, of which one is a prompt", "Give longer text.")
    number = min(count, len(long_enough))
    chosen = (long_enough[index * len(long_enough) // number] for index in range(number))
    return [ids[: _prompt_length(len(ids))] for ids in chosen]


def continue_greedily(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Ids],
    batch_tokens: int,
    max_new_tokens: int | None = None,
    advance: Callable[[float], None] = ignored,
) -> list[list[int]]:
    """The most probable next token, again and again, until the end token or `max_new_tokens`.

    Prompts of one length run together, so that none is padded. Nothing of the checkpoint's own generation_config.json
    holds but what ends a text: no sampling, no penalties.

    Args:
        model: in evaluation mode, on its device.
        max_new_tokens: None: `NEW_TOKENS`; in any case no more than the model has positions for.
        advance: is called with how many prompts are done.

    Returns:
        Of each prompt the new tokens, an end token included.
    """
    import torch
    from transformers import GenerationConfig

    ends = end_ids(model, tokenizer)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=sorted(ends) or None,
        pad_token_id=padding_id(model, tokenizer),
    )
    positions, asked = position_count(model), max_new_tokens or NEW_TOKENS
    made: dict[int, list[int]] = {}
    for rows in _of_like_length(prompts, batch_tokens, asked):
        ids = torch.tensor([list(prompts[row]) for row in rows], device=model.device)
        room = asked if positions is None else max(1, min(asked, positions - ids.shape[1]))
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=room)
        for row, line in zip(rows, output[:, ids.shape[1] :].tolist(), strict=True):
            kept = len(list(takewhile(lambda token: token not in ends, line)))
            made[row] = line[: kept + 1]
        advance(len(rows))
    return [made[row] for row in range(len(prompts))]


def agreement(first: Sequence[Ids], other: Sequence[Ids]) -> Agreement:
    """How far `other`, of the same prompts, goes along with `first`."""
    before = equal = 0
    for mine, theirs in zip(first, other, strict=True):
        same = [a == b for a, b in zip(mine, theirs, strict=False)]
        before += len(list(takewhile(bool, same)))
        equal += sum(same)
    tokens = sum(map(len, first))
    return Agreement(len(first), tokens / len(first), before / len(first), equal / tokens)


def _prompt_length(tokens: int) -> int:
    length = PROMPT
    while length > tokens // 2:
        length //= 2
    return length


def _of_like_length(prompts: Sequence[Ids], batch_tokens: int, new: int) -> Iterator[list[int]]:
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    for length, rows in groupby(order, key=lambda row: len(prompts[row])):
        yield from chunks(rows, max(1, batch_tokens // (length + new)))
