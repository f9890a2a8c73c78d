"""Models in other forms: GGUF files are decoded, adapters are merged into their base models."""

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from prunecli.errors import CheckpointError, PruneError
from prunecli.model import conversion
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from prunecli.tensors.hub.names import origin
from tests.families import tiny_family
from tests.tiny import PIECES, change_json


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Conversions are forgotten at the end."""
    monkeypatch.setattr(conversion, "_CONVERTED", {})


def write_gguf(
    source: Path, file: Path, *, quantised: bool = False, more: Callable[[Any], None] = lambda writer: None
) -> dict[str, Any]:
    """Write a tiny Qwen2 as llama.cpp does it; returns the values under the names of transformers.

    Args:
        more: gives its writer further fields and tensors.
    """
    gguf = pytest.importorskip("gguf")
    checkpoint = open_model(source)
    config, tensors = checkpoint.config, {name: checkpoint.read(name) for name in checkpoint.tensors}
    writer = gguf.GGUFWriter(file, "qwen2")
    for name, key in (
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("block_count", "num_hidden_layers"),
        ("feed_forward_length", "intermediate_size"),
        ("head_count", "num_attention_heads"),
        ("head_count_kv", "num_key_value_heads"),
    ):
        getattr(writer, f"add_{name}")(config[key])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantised else gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    pieces = [*PIECES[1:], "he"]
    writer.add_token_list([*pieces, *(f"<{number}>" for number in range(config["vocab_size"] - len(pieces)))])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(len(pieces))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for name, values in tensors.items():
        stem, _, ending = name.rpartition(".")
        if quantised and values.ndim == 2 and ending == "weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quantize(values, kind)
            tensors[name] = gguf.dequantize(packed, kind)
            writer.add_tensor(f"{names.get_name(stem)}.{ending}", packed, raw_dtype=kind)
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{ending}", values)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_file_opens_with_its_values_and_tokenizer(tmp_path):
    source = tiny_family(tmp_path / "source", "qwen2")
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "tiny.Q8_0.gguf"
    tensors = write_gguf(source, file)
    said = []
    directory = conversion.checkpoint_directory(file, say=said.append)
    assert said == [f"Decoded from F32 to float32: {file}"]
    assert origin(directory) == {"path": file.name}
    checkpoint = open_model(file)
    assert checkpoint.path == directory
    assert {name: checkpoint.read(name).tolist() for name in checkpoint.tensors} == {
        name: values.tolist() for name, values in tensors.items()
    }
    assert checkpoint.fingerprint == open_model(source).fingerprint
    assert AutoTokenizer.from_pretrained(directory).tokenize("the") == ["t", "he"]
    assert conversion.checkpoint_directory(file.parent) != directory  # another name, another conversion
    assert directory.parent.parent == tmp_path
    conversion._CONVERTED.clear()
    gc.collect()
    assert not directory.exists()
    assert not [*tmp_path.glob(".prunecli-*")]


def test_a_directory_with_one_quantised_gguf_file_becomes_bfloat16():
    source = tiny_family("source", "qwen2", vocab_size=64, hidden_size=64, intermediate_size=96)
    Path("model").mkdir()
    tensors = write_gguf(source, "model/a.gguf", quantised=True)
    checkpoint = open_model("model")
    for name, values in tensors.items():
        held = checkpoint.read(name).astype(np.float32)
        assert np.array_equal(held, torch.tensor(values).bfloat16().float().numpy()), name
    write_gguf(source, "model/b.gguf")
    with pytest.raises(CheckpointError, match=r"in GGUF \(a.gguf\)"):
        open_model("model")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            lambda writer: writer.add_tensor("blk.0.attn_output.bias", np.ones(16, np.float32)),
            "holds 16 values",
        ),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.full(2, 3, np.float32)), "scales rotary"),
        (lambda writer: writer.add_rope_scaling_factor(4.0), "scales rotary"),
    ],
)
def test_a_gguf_file_with_more_than_transformers_reads_is_refused(more, said):
    write_gguf(tiny_family("source", "qwen2"), Path("a.gguf"), more=more)
    with pytest.raises(CheckpointError, match=said):
        open_model("a.gguf")


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_positions_of_llama_3_are_scaled_as_its_file_says(factor):
    frequency = 500_000**-0.5
    smooth = (8192 * frequency / (2 * math.pi) - 1) / 3  # between the two wavelengths
    divisors = np.array([1, 1 / ((1 - smooth) / factor + smooth)], np.float32)

    def more(writer: Any) -> None:
        writer.add_rope_freq_base(500_000.0)
        writer.add_tensor("rope_freqs.weight", divisors)

    write_gguf(tiny_family("source", "qwen2"), Path("a.gguf"), more=more)
    with open_model("a.gguf") as opened:
        found = opened.config["rope_parameters"]
    assert (found["rope_type"], found["factor"], found["rope_theta"]) == ("llama3", factor, 500_000.0)


def _adapter(base: Path, folder: str, **changes: Any) -> dict[str, np.ndarray]:
    """Write an adapter whose updates are not zero; returns the weights of the base with the updates added."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(
        r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(folder)
    change_json(f"{folder}/adapter_config.json", **changes)
    return {name: value.numpy() for name, value in adapted.merge_and_unload().state_dict().items()}


def test_an_adapter_is_merged_into_its_base():
    base, folder = tiny_family("base", "llama"), "adapter"
    merged = _adapter(base, folder)
    Path("adapter/chat_template.jinja").write_text("own")
    said = []
    directory = conversion.checkpoint_directory(folder, say=said.append)
    assert said == [f"Merged with its base model {base}: {folder}"]
    assert (directory / "chat_template.jinja").read_text() == "own"
    assert (directory / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert not (directory / "adapter_config.json").exists()
    checkpoint = open_model(folder)
    assert checkpoint.path == directory
    assert checkpoint.fingerprint != open_model(base).fingerprint
    for name in checkpoint.tensors:
        assert np.array_equal(checkpoint.read(name), merged[name]), name


@pytest.mark.parametrize(
    ("options", "labels", "tokens"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, 0, 0),
        ({"target_modules": ["lm_head", "embed_tokens"]}, 0, 0),
        ({"modules_to_save": ["lm_head"]}, 0, 0),
        ({"modules_to_save": ["lm_head", "embed_tokens"]}, 0, 3),
        ({"target_modules": ["q_proj", "embed_tokens"]}, 0, 3),
        ({"task_type": "SEQ_CLS"}, 5, 0),
    ],
)
def test_merged_it_says_what_the_adapted_model_says(options, labels, tokens):
    """The table that is tied to the output layer is adapted alone; there are further tokens, or labels."""
    peft = pytest.importorskip("peft")
    base = tiny_family("base", "llama", tie_word_embeddings=True, pad_token_id=1)
    torch.manual_seed(0)
    if labels:
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    else:
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(model.config.vocab_size + tokens)
    settings = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **settings)).eval()
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data += torch.randn_like(weight) / 4
    adapted.save_pretrained("adapter")
    text = torch.randint(2, model.config.vocab_size, (2, 7))
    merged = load_model("adapter", device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(merged(text).logits, adapted(text).logits)


def test_what_neither_base_nor_adapter_has_is_not_drawn_at_random():
    peft = pytest.importorskip("peft")
    model = AutoModel.from_pretrained(tiny_family("base", "bert"))  # of a head that needs no pooler
    config = peft.LoraConfig(target_modules=["query"], task_type="FEATURE_EXTRACTION")
    peft.get_peft_model(model, config).save_pretrained("adapter")
    assert not any("pooler" in name for name in open_model("adapter").tensors)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base_model_name_or_path": None}, "adapter_config.json: names no base model"),
        ({"base_model_name_or_path": "org/none"}, "adapter: its base model org/none: no such directory here"),
        ({"peft_type": "PREFIX_TUNING"}, r"an adapter \(PREFIX_TUNING\) of .*base, not a whole model"),
        ({"r": 3}, "adapter: cannot be converted"),
        (
            {"task_type": "FEATURE_EXTRACTION"},
            "adapter: lacks base_model.model.layers.0",
        ),  # names of another class
    ],
)
def test_adapters_that_cannot_be_merged(changes, said):
    _adapter(tiny_family("base", "llama"), "adapter", **changes)
    with pytest.raises(PruneError, match=said):
        open_model("adapter")
