"""Divergences from a first model against one position at a time (tests/reference/divergence.py)."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prunecli.errors import DataError, UsageError
from prunecli.evaluation import language_model
from prunecli.evaluation.language_model import Compared, Reference
from prunecli.modules import logits
from prunecli.modules.loading import load_model
from prunecli.running.examples import Batch
from prunecli.running.runner import InMemory
from prunecli.running.windows import Window, window_examples
from tests.families import DECODERS, tiny_family
from tests.families.records import own_branches
from tests.reference import divergence as reference
from tests.tiny import VOCAB

WINDOWS = [
    Window(0, tuple(range(5, 17)), 11),
    Window(0, tuple(range(20, 29)), 3),
    Window(1, (7, 8), 1),
    Window(2, tuple(range(30, 42)), 11),
]
UNDECLARED: dict[str, dict[str, Any]] = {
    "phi": {},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
    "mamba": {"state_size": 4},
    "bloom": {},
}
"""A head with a bias, with scales; experts; a model without attention; one whose body has another name."""


def batches(size: int = 24) -> list[Batch]:
    return window_examples(WINDOWS, 1).batches(size)


def expected(first: Any, other: Any) -> tuple[list[list[float]], list[int]]:
    """Expected sums of each window, by tokens before (1, 2 to 3, 4 to 7, 8 to 15), and how often both agree."""
    sums, agreed = [], []
    for window in WINDOWS:
        both = [reference.distributions(model, window.ids, window.counted) for model in (first, other)]
        rows = list(zip(*both, strict=True))
        spans = [0.0] * 4
        for place, (p, q) in enumerate(rows, start=len(window.ids) - window.counted):
            spans[int(math.log2(place))] += reference.divergence(p, q)
        sums.append(spans)
        agreed.append(sum(reference.top(p) == reference.top(q) for p, q in rows))
    return sums, agreed


TOKENS = [[1, 2, 4, 4], [0, 0, 2, 1], [1, 0, 0, 0], [1, 2, 4, 4]]
"""Counted tokens of WINDOWS by how many come before."""


def measured(first: Any, *others: Any, runner: Any = InMemory) -> list[Compared]:
    with closing(Reference(batches())) as kept:
        found = [kept.measure(runner(first), "reading")]
        return [*found, *(kept.measure(runner(other), "reading") for other in others)]


def undeclared(model_type: str, seed: int) -> Any:
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
        "pad_token_id": 1,
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**shape, **UNDECLARED[model_type]})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def assert_right(found: list[Compared], wanted: tuple[list[list[float]], list[int]]) -> None:
    itself, same, other = found
    assert (itself.divergence == 0).all()
    assert (itself.agreed == itself.tokens.sum(axis=1)).all()
    assert (same.divergence == 0).all(), "a model does not diverge from itself"
    assert (same.agreed == same.tokens.sum(axis=1)).all()
    assert np.array_equal(same.nats, itself.nats)
    assert other.tokens.tolist() == TOKENS
    assert other.divergence == pytest.approx(np.array(wanted[0]), rel=1e-4, abs=1e-5)
    assert max(map(max, wanted[0])) > 1e-3
    assert other.agreed.tolist() == wanted[1]


@pytest.mark.parametrize("model_type", [*own_branches(DECODERS), "qwen3"])
def test_declared_families(model_type, tmp_path):
    paths = [tiny_family(tmp_path / str(seed), model_type, seed=seed) for seed in (0, 1)]
    first, same, other = (load_model(paths[number], device="cpu") for number in (0, 0, 1))
    wanted = expected(first, other)
    assert_right(measured(first, same, other), wanted)


@pytest.mark.parametrize("model_type", UNDECLARED)
def test_families_that_are_not_declared(model_type, monkeypatch):
    first, same, other = (undeclared(model_type, seed) for seed in (0, 0, 1))
    wanted = expected(first, other)
    monkeypatch.setattr(logits, "BLOCK_VALUES", 5 * VOCAB)
    monkeypatch.setattr(language_model, "ROWS", 2)
    assert_right(measured(first, same, other), wanted)


def test_only_the_head_is_kept(tmp_path):
    """The reference keeps the output layer, or the table if the embeddings are tied, and never a layer."""
    for model_type, kept in (("gpt2", {"transformer.wte.weight"}), ("qwen3", {"lm_head.weight"})):
        more = {"tie_word_embeddings": False} if model_type == "qwen3" else {}
        model = load_model(tiny_family(tmp_path / model_type, model_type, **more), device="cpu")
        with closing(Reference(batches())) as reference_:
            reference_.measure(InMemory(model), "reading")
        assert {name for name, value in model.named_parameters() if value.numel()} == kept


def test_a_head_that_takes_something_else(tmp_path, monkeypatch):
    """The model is kept whole, and run again."""
    monkeypatch.setattr(logits, "_parts", lambda _model: {})
    paths = [tiny_family(tmp_path / str(seed), "gpt2", seed=seed) for seed in (0, 1)]
    first, same, other = (load_model(paths[number], device="cpu") for number in (0, 0, 1))
    wanted = expected(first, other)
    assert_right(measured(first, same, other), wanted)
    assert all(value.numel() for value in first.parameters())


def test_a_token_that_only_the_first_allows(tmp_path):
    """Its divergence is infinite: no mean can be made of it."""
    first, other = (load_model(tiny_family(tmp_path / str(n), "gpt2", seed=n), device="cpu") for n in (0, 1))
    forward = other.forward

    def without_token_9(**inputs):
        output = forward(**inputs)
        output.logits[..., 9] = -torch.inf
        return output

    other.forward = without_token_9
    with pytest.raises(DataError, match="inf, not a finite number"):
        measured(first, other)


def test_another_vocabulary_is_refused():
    first, other = (undeclared("phi", seed) for seed in (0, 1))
    other.resize_token_embeddings(VOCAB - 1)
    with pytest.raises(
        UsageError, match=f"a vocabulary of {VOCAB - 1} entries is compared with one of {VOCAB}"
    ):
        measured(first, other)
