"""Tiny models by rule: those of some kinds; `python -m tests.families` builds all."""

import pytest
import torch

from tests.families import cutting, tiny


@pytest.mark.parametrize("model_type", ["bamba", "bert", "gemma3_text", "gpt2", "mamba", "qwen3_moe", "t5"])
def test_a_tiny_model_of_each_kind_has_varied_finite_logits(model_type):
    model = tiny.build(model_type)
    logits = cutting.logits(model, tiny.inputs(model))
    assert logits.isfinite().all()
    assert logits.std() > 0.1
    assert not torch.allclose(logits[0], logits[1])


def test_exceptions_are_of_types_that_transformers_names():
    pytest.importorskip("transformers", minversion="5.23")  # has them all
    named = {name for names in tiny.HEADS.values() for name in names}
    assert {*tiny.OVERRIDES, *tiny.CANNOT} <= named
