"""Layer by layer, every family says what it says in memory, to the last bit."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli.model.checkpoint import open_model
from prunecli.modules.building import refused_by_layer
from tests import ffn_layouts
from tests.contracts.method_contract import written
from tests.families import MODEL_TYPES, tiny, tiny_family
from tests.families.records import own_branches
from tests.ffn_layouts import LAYOUTS, OWN_SHAPES, write_changed
from tests.opening import load
from tests.running.layerwise.running import passes, skeleton_of, started
from tests.selections import kept_experts, kept_heads
from tests.tiny import tiny_nllb_moe


def assert_same(path: Path, memory: int = 1 << 20) -> None:
    """The outputs of the batches, in memory and layer by layer."""
    whole, found = load(path), dict[int, Any]()
    with torch.inference_mode():
        wanted = [run() for run in passes(whole)]
    checkpoint = open_model(path)
    skeleton = skeleton_of(checkpoint)
    with started(skeleton, checkpoint, memory) as (layers, _):
        layers.forward(passes(skeleton.model), finish=found.__setitem__)
    assert len(found) == len(wanted)
    assert all(torch.equal(found[number], logits) for number, logits in enumerate(wanted))


@pytest.mark.parametrize(
    ("model_type", "memory"),
    [
        # In memory and in a file.
        *((model_type, 4992) for model_type in (*own_branches(MODEL_TYPES), "smollm3", "gemma3_text")),
        *(("gpt2", memory) for memory in (1 << 20, 0)),
    ],
)
def test_dense_families(model_type, memory, models):
    assert_same(models[model_type], memory)


@pytest.mark.parametrize("model_type", ["granite", "falcon", "apertus", "modernvbert", "mellum"])
def test_families_that_are_found(model_type):
    """Apertus has scalars in its layers, ModernVBERT's text model a rule of its own for buffers, Mellum experts."""
    path = "model"
    tiny.build(model_type).save_pretrained(path)
    assert refused_by_layer(open_model(path)) is None
    assert_same(path)


@pytest.mark.parametrize("model_type", ["gemma3n_text", "cpmant", "zamba", "gte", "longcat_flash"])
def test_layers_that_cannot_run_alone(model_type):
    """They hand on more than their output, tell the model's device, share parameters, or turn tensors into others."""
    path = "model"
    tiny.build(model_type).save_pretrained(path)
    assert "measured with the whole model" in str(refused_by_layer(open_model(path)))


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
def test_other_forms_of_a_family(case, changes):
    assert_same(tiny_family("model", case, **changes))


def test_uneven_experts():
    kept = {"model.encoder.layers.1.ffn": (1, 4, 6), "model.decoder.layers.3.ffn": (0, 7)}
    assert_same(written(tiny_nllb_moe("source"), kept_experts(kept), "pruned"))


@pytest.mark.parametrize("model_type", ["t5", "llama"])
def test_uneven_heads(model_type, models):
    kept, source = itertools.cycle(((1, 3), (0, 1, 2), ())), models[model_type]
    chosen = kept_heads({layer.name: next(kept) for layer in open_model(source).layout.attentions})
    assert_same(written(source, chosen, "pruned"))


@pytest.mark.parametrize("case", OWN_SHAPES)
def test_shared_and_removed_ffns(case):
    names = list(LAYOUTS[case].names)
    changes = {names[1]: {"shared_with": names[0]}, names[2]: {"removed": True}}
    path = write_changed(ffn_layouts.tiny("source", case), "changed", case, changes)
    assert_same(path, 0)
