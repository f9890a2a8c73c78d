"""`save_pretrained` of a loaded model writes what every way of opening it reads back bit by bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, NllbMoeForConditionalGeneration

from prunecli.model.checkpoint import open_model
from prunecli.modules.saving import stock_names
from tests.contracts.method_contract import digests, logits, logits_of, written
from tests.opening import load
from tests.selections import kept_experts
from tests.tiny import config_of, tiny_nllb_moe

KEPT = {
    "full": {},
    "even": {f"model.{side}.layers.{n}.ffn": (2, 3, 5) for side in ("encoder", "decoder") for n in (1, 3)},
    "uneven": {"model.encoder.layers.1.ffn": (1, 4, 6), "model.decoder.layers.3.ffn": (0, 7)},
}


def checkpoint(kind: str) -> Path:
    source = tiny_nllb_moe("tiny")
    return written(source, kept_experts(KEPT[kind]), kind) if KEPT[kind] else source


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()
    }


@pytest.fixture(params=list(KEPT))
def opened(request):
    path = checkpoint(request.param)
    return path, load(path)


def test_saved_opens_with_the_same_logits(opened):
    path, model = opened
    out, saved = Path("out"), []
    for _ in range(2):
        model.save_pretrained(out, max_shard_size="20KB")
        saved.append(digests(out))
    assert saved[0] == saved[1]
    open_model(out).check()
    assert torch.equal(logits(out), logits_of(model))
    before, after = tensors(path), tensors(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(list(out.glob("*.safetensors"))) == len(list(out.glob("model-*-of-*"))) > 1


def test_saved_opens_with_transformers(opened):
    path, model = opened
    out = "out"
    model.save_pretrained(out)
    if "auto_map" in config_of(out):
        theirs = AutoModelForSeq2SeqLM.from_pretrained(out, trust_remote_code=True)
        assert torch.equal(logits_of(theirs), logits_of(model))
        with pytest.raises(ValueError, match="stock routing"):
            AutoModelForSeq2SeqLM.from_pretrained(out)
    else:
        stock = NllbMoeForConditionalGeneration.from_pretrained(out).eval()
        original = NllbMoeForConditionalGeneration.from_pretrained(path).eval()
        assert torch.equal(logits_of(stock), logits_of(original))


def test_experts_are_views_each_with_a_storage_of_its_own():
    """transformers clones what shares a storage: the experts would be in memory twice."""
    path = checkpoint("full")
    model = load(path)
    layers = open_model(path).require_mixtures()
    names = stock_names(model.state_dict(), layers)
    held = [names[f"model.encoder.layers.1.ffn.experts.expert_{e}.fc1.weight"] for e in range(8)]
    stacked = model.model.encoder.layers[1].ffn.fc1_weight
    assert [value.data_ptr() for value in held] == [stacked[e].data_ptr() for e in range(8)]
    assert len({value.untyped_storage().data_ptr() for value in held}) == 8


@pytest.mark.parametrize(
    "options", [{"push_to_hub": True}, {"variant": "fp16"}, {"distributed_checkpoint": True}]
)
def test_what_nothing_would_open_is_refused(options):
    model = load(checkpoint("full"))
    with pytest.raises(ValueError, match=next(iter(options))):
        model.save_pretrained("out", **options)
    assert not Path("out").exists()
