"""Greedy continuations against a plain loop without a cache (tests/reference/divergence.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GenerationConfig

from prunecli.errors import DataError
from prunecli.evaluation.language_model import (
    NEW_TOKENS,
    PROMPT,
    choose_prompts,
    continue_greedily,
)
from prunecli.modules.loading import load_model
from prunecli.text.tokens import load_tokenizer
from tests.families import tiny_family
from tests.reference.divergence import continued

PROMPTS = [(5, 6, 7, 8), (9,), (11, 12, 13, 14), (20, 21), (30,)]


@pytest.mark.parametrize("model_type", ["gpt2"])
def test_the_most_probable_tokens(model_type: str, tmp_path: Path) -> None:
    path = tiny_family(tmp_path, model_type)
    model, tokenizer = load_model(path, device="cpu"), load_tokenizer(path)
    # The checkpoint's own settings hold for nothing but the end.
    free = [continued(model, prompt, 12, None) for prompt in PROMPTS]
    end = free[0][5]
    model.generation_config = GenerationConfig(do_sample=True, repetition_penalty=9.0, eos_token_id=[end])
    done: list[float] = []
    found = continue_greedily(model, tokenizer, PROMPTS, 32, 12, done.append)
    assert found == [continued(model, prompt, 12, end) for prompt in PROMPTS]
    assert found[0][-1] == end
    assert len(found[0]) <= 6
    assert sum(done) == len(PROMPTS)


def test_no_more_than_the_positions(tmp_path: Path) -> None:
    path = tiny_family(tmp_path, "gpt2")
    model, tokenizer = load_model(path, device="cpu"), load_tokenizer(path)
    positions = model.config.max_position_embeddings
    model.generation_config.eos_token_id = model.config.eos_token_id = -5
    (made,) = continue_greedily(model, tokenizer, [(5, 6, 7)], 32, 1000)
    assert len(made) == positions - 3
    (usual,) = continue_greedily(model, tokenizer, [(5, 6, 7)], 32)
    assert len(usual) == min(NEW_TOKENS, positions - 3)


def test_prompts_are_spread_over_the_texts() -> None:
    texts = [tuple(range(10 * n, 10 * n + length)) for n, length in enumerate((1, 2, 3, 9, 500, 70, 64))]
    chosen = choose_prompts(texts, 3)
    assert chosen == [(10,), (30, 31, 32, 33), tuple(range(50, 50 + PROMPT))]
    assert [len(ids) for ids in choose_prompts(texts, 99)] == [1, 1, 4, 32, 32, 32]
    with pytest.raises(DataError, match="no text has two tokens"):
        choose_prompts([(1,), ()], 3)
