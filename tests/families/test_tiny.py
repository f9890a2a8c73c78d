"""Tiny models by rule: some of each kind are built and masked; `python -m tests.families` builds all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.families import masked, tiny

KINDS = (
    "bamba",
    "bert",
    "deepseek_v3",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "llama",
    "mamba",
    "qwen3_moe",
    "t5",
    "t5gemma",
)


@pytest.mark.parametrize("model_type", KINDS)
def test_a_tiny_model_of_each_kind_has_varied_finite_logits(model_type: str) -> None:
    model = tiny.build(model_type)
    logits = masked.logits(model, tiny.inputs(model))
    assert logits.isfinite().all()
    assert logits.std() > 0.1
    assert not torch.allclose(logits[0], logits[1])


def test_a_seed_decides_all_weights() -> None:
    first, same, other = (tiny.build("llama", seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_every_type_that_transformers_names_is_built_or_listed() -> None:
    named = {name for names in tiny.HEADS.values() for name in names}
    assert {*tiny.model_types(), *tiny.CANNOT} == named
    assert set(tiny.OVERRIDES) <= named


@pytest.mark.parametrize("model_type", tiny.CANNOT)
def test_the_types_listed_as_impossible_fail(model_type: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - each class fails in its own way
        _run(model_type)


def test_zeroing_all_units_of_an_ffn_is_a_layer_without_it() -> None:
    model = tiny.build("llama")
    rows = tiny.inputs(model)
    mlp = "model.layers.1.mlp"
    zeroed = masked.without_units(
        model, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [f"{mlp}.down_proj"], range(80)
    )
    hook = model.get_submodule(mlp).register_forward_hook(lambda *_: torch.zeros(()))
    torch.testing.assert_close(masked.logits(zeroed, rows), masked.logits(model, rows))
    hook.remove()
    assert not torch.allclose(masked.logits(zeroed, rows), masked.logits(model, rows))


@pytest.mark.parametrize("model_type", ["gpt2", "t5"])
def test_a_removed_layer_returns_its_input(model_type: str) -> None:
    names = {"gpt2": ["transformer.h.1"], "t5": ["encoder.block.0", "decoder.block.2"]}[model_type]
    model = tiny.build(model_type)
    rows = tiny.inputs(model)
    cut = masked.logits(masked.without_layers(model, names), rows)
    assert cut.isfinite().all()
    assert not torch.allclose(cut, masked.logits(model, rows))


def test_a_removed_layer_of_llama_equals_a_model_without_it() -> None:
    model = tiny.build("llama")
    rows = tiny.inputs(model)
    cut = masked.logits(masked.without_layers(model, ["model.layers.1"]), rows)
    del model.model.layers[1]
    model.config.num_hidden_layers = 2
    torch.testing.assert_close(cut, masked.logits(model, rows))


def test_zeroing_all_heads_is_a_layer_without_attention() -> None:
    model = tiny.build("llama")
    rows = tiny.inputs(model)
    zeroed = masked.without_heads(model, "model.layers.0.self_attn.o_proj", 12, range(4))
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: torch.zeros(()))
    torch.testing.assert_close(masked.logits(zeroed, rows), masked.logits(model, rows))


def test_the_logits_of_some_tokens() -> None:
    logits = torch.arange(12.0).reshape(1, 3, 4)
    assert masked.token_logits(logits, [0, 3]).tolist() == [[[0, 3], [4, 7], [8, 11]]]


def _run(model_type: str) -> Any:
    model = tiny.build(model_type)
    return masked.logits(model, tiny.inputs(model))
