"""Layer by layer, every family says what it says in memory, to the last bit."""

from __future__ import annotations

import pytest

from prunecli.model.checkpoint import open_model
from prunecli.modules.building import refused_by_layer
from prunecli.pipeline import apply
from prunecli.selection.cut import cut
from tests.families import MODEL_TYPES, tiny, tiny_family
from tests.families.records import own_branches
from tests.ffn_layouts import OWN_SHAPES
from tests.running.layerwise.running import assert_same, by_layer, in_memory, with_shared_ffns, without_heads
from tests.selections import kept_experts
from tests.tiny import tiny_nllb_moe


@pytest.mark.parametrize(
    ("model_type", "memory"),
    [
        # In memory and in a file.
        *((model_type, 4992) for model_type in (*own_branches(MODEL_TYPES), "smollm3", "gemma3_text")),
        *(("gpt2", memory) for memory in (1 << 20, 0)),
    ],
)
def test_dense_families(model_type, memory, tmp_path):
    path = tiny_family(tmp_path / "model", model_type)
    found, _ = by_layer(path, memory)
    assert_same(found, in_memory(path))


@pytest.mark.parametrize("model_type", ["granite", "falcon"])
def test_families_that_are_found(model_type, tmp_path):
    path = tmp_path / "model"
    tiny.build(model_type).save_pretrained(path)
    with open_model(path) as checkpoint:
        assert refused_by_layer(checkpoint) is None
    found, _ = by_layer(path)
    assert_same(found, in_memory(path))


def test_layers_that_hand_on_more_than_their_output(tmp_path):
    path = tmp_path / "model"
    tiny.build("gemma3n_text").save_pretrained(path)
    with open_model(path) as checkpoint:
        assert "measured with the whole model" in str(refused_by_layer(checkpoint))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("t5-gated", {}),
        ("llama-tied", {}),
        ("bert-classifier", {}),
        ("bart", {"architectures": ["BartModel"]}),
        ("gpt2", {"architectures": ["GPT2Model"]}),
    ],
)
def test_other_forms_of_a_family(case, changes, tmp_path):
    path = tiny_family(tmp_path / "model", case, **changes)
    found, _ = by_layer(path)
    assert_same(found, in_memory(path))


def test_uneven_experts(tmp_path):
    kept = {"model.encoder.layers.1.ffn": (1, 4, 6), "model.decoder.layers.3.ffn": (0, 7)}
    source, pruned = tiny_nllb_moe(tmp_path / "source"), tmp_path / "pruned"
    with open_model(source) as opened:
        rewrite = cut(opened, kept_experts(kept))
        apply(opened, rewrite, pruned)
    found, _ = by_layer(pruned)
    assert_same(found, in_memory(pruned))


@pytest.mark.parametrize("model_type", ["t5", "llama"])
def test_uneven_heads(model_type, tmp_path):
    pruned = without_heads(tmp_path, model_type)
    found, _ = by_layer(pruned)
    assert_same(found, in_memory(pruned))


@pytest.mark.parametrize("case", OWN_SHAPES)
def test_shared_and_removed_ffns(case, tmp_path):
    path = with_shared_ffns(tmp_path, case)
    found, _ = by_layer(path, 0)
    assert_same(found, in_memory(path))
