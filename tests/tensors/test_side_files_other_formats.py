"""What is said of files and folders that are no checkpoints, and of a config.json without a type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prunecli.errors import PruneError
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from tests.families import tiny_family
from tests.tiny import write_json

CONFIG = {"config.json": {"model_type": "bloom"}}
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "org/base"}
CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "empty": ({}, "", "an empty directory", "Copy a model into it"),
    "file of an adapter": (
        {"adapter_config.json": LORA, "adapter_model.safetensors": ""},
        "adapter_model.safetensors",
        "not a directory (an adapter (LORA) of org/base",
        "Give a directory here with its adapter_config.json",
    ),
    "prompts": (
        {"adapter_config.json": {"peft_type": "PROMPT_TUNING"}},
        "",
        "an adapter (PROMPT_TUNING), not",
        "or its base model if",
    ),
    "several of gguf": (
        {"a.Q4.gguf": "", "b.gguf": ""},
        "",
        "weights of llama.cpp, in GGUF (a.Q4.gguf)",
        "one file here that ends in .gguf",
    ),
    "weights": (
        {**CONFIG, "model.safetensors": ""},
        "model.safetensors",
        "a file, not",
        "Give the directory that",
    ),
    "tensorflow": ({**CONFIG, "tf_model.h5": ""}, "", "weights of TensorFlow (tf_model.h5)", "from_tf=True"),
    "flax": ({**CONFIG, "flax_model.msgpack": ""}, "", "weights of Flax", "from_flax=True"),
    "onnx": (
        {**CONFIG, "onnx/model.onnx": ""},
        "",
        "exported to ONNX or OpenVINO (onnx/model.onnx)",
        "was exported",
    ),
    "of its authors": (
        {"consolidated.00.pth": ""},
        "",
        "in a format of its authors",
        "the script of transformers",
    ),
    "shards": (
        {**CONFIG, "model-00001-of-00002.bin": ""},
        "",
        "no index of the shards",
        "Download the index",
    ),
    "pipeline": (
        {"model_index.json": {}, "text_encoder/config.json": {}, "unet/config.json": {}},
        "",
        "a pipeline of diffusers",
        "/text_encoder.",
    ),
    "training": ({"checkpoint-5/config.json": {}}, "", "a folder of checkpoints", "/checkpoint-5."),
    "no config": (
        {"model.safetensors": ""},
        "",
        "holds weights and no config.json",
        "Copy the model's config.json",
    ),
    "notes": ({"notes.txt": ""}, "", "not a checkpoint (it holds no config.json)", "Give the directory"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_checkpoint_is_said_to_be_what_it_is(case: str, tmp_path: Path) -> None:
    files, given, what, remedy = CASES[case]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content) if name.endswith(".json") else content)
    with pytest.raises(PruneError) as refused:
        open_model(tmp_path / given)
    assert what in refused.value.message
    assert remedy in str(refused.value.remedy)


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        ("gpt2", {}, r'names no "model_type"\nAdd "model_type"; the tensors fit gpt-sw3 or gpt2\.'),
        ("bert", {"architectures": None}, r"the tensors fit bert\."),
        ("bert", {"hidden_size": 8}, r"the tensors fit no type of the installed"),
        ("bert", {"_class_name": "UNet"}, "of UNet, of diff"),
    ],
)
def test_a_config_without_a_type(case: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tiny_family(tmp_path / "model", case)
    config = json.loads((path / "config.json").read_text())
    del config["model_type"]
    write_json(path / "config.json", config | changes)
    with pytest.raises(PruneError, match=said):
        load_model(path, device="cpu")
    with open_model(path) as checkpoint, pytest.raises(PruneError, match=said):
        checkpoint.require_architecture()
