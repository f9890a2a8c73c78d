"""The bundled checkpoint: stock layout, small, its tokenizer faithful, its language codes known."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from prunecli.demo import CHECKPOINT, DATA, LANGUAGES
from tests.tiny import config_of

BYTES = 6_000_000


@pytest.fixture(scope="module")
def config():
    return config_of(CHECKPOINT)


def expected_names(config: dict) -> set[str]:
    """The stock names of an NLLB-MoE, spelled out."""
    norm = ("weight", "bias")
    names = {"model.shared.weight"}
    for side, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "cross_attention"])):
        names |= {f"model.{side}.layer_norm.{part}" for part in norm}
        for index in range(config[f"{side}_layers"]):
            layer = f"model.{side}.layers.{index}"
            names |= {f"{layer}.{a}_layer_norm.{part}" for a in [*attentions, "ff"] for part in norm}
            projections = ("q_proj", "k_proj", "v_proj", "out_proj")
            names |= {f"{layer}.{a}.{p}.{part}" for a in attentions for p in projections for part in norm}
            owners = [f"{layer}.ffn"]
            if (index + 1) % config[f"{side}_sparse_step"] == 0:
                owners = [f"{layer}.ffn.experts.expert_{expert}" for expert in range(config["num_experts"])]
                names.add(f"{layer}.ffn.router.classifier.weight")
            names |= {
                f"{owner}.{linear}.{part}" for owner in owners for linear in ("fc1", "fc2") for part in norm
            }
    return names


def test_the_directory_is_small_and_complete():
    files = {file.name: file.stat().st_size for file in CHECKPOINT.iterdir()}
    assert set(files) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < BYTES


def test_the_layout_is_stock(config):
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == expected_names(config)
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.float16
            assert torch.isfinite(tensor).all()
        router = file.get_slice("model.decoder.layers.3.ffn.router.classifier.weight").get_shape()
    assert router == [config["num_experts"], config["d_model"]]
    assert config["model_type"] == "nllb-moe"
    assert config["dtype"] == "float16"


def test_the_stock_class_finds_every_tensor():
    from transformers import AutoModelForSeq2SeqLM

    _, report = AutoModelForSeq2SeqLM.from_pretrained(
        CHECKPOINT, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


@pytest.mark.parametrize("code", LANGUAGES)
def test_the_tokenizer_gives_every_sentence_back(code, config):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, src_lang=code, local_files_only=True)
    assert type(tokenizer).__name__ == "NllbTokenizer"
    assert len(tokenizer) == config["vocab_size"]
    sentences = (DATA / f"test.{code}").read_text(encoding="utf-8").splitlines()
    for ids, sentence in zip(tokenizer(sentences)["input_ids"], sentences, strict=True):
        assert ids[0] == tokenizer.convert_tokens_to_ids(code)
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == sentence
