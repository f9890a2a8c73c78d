"""Gate statistics of language models whose layers and experts stay on disk: those of a run in memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prunecli.errors import CheckpointError
from prunecli.methods.experts.batches import CollectOptions, Texts
from prunecli.model.checkpoint import open_model
from prunecli.modules.building import make_model
from prunecli.pipeline import apply
from prunecli.results.gates import GateStatistics
from prunecli.running.layerwise.runner import RunReport
from prunecli.selection.cut import cut
from tests.methods.experts import test_layerwise
from tests.methods.experts.test_batches_texts import OPTIONS, TEXTS
from tests.methods.experts.test_layerwise import assert_same
from tests.running.layerwise.running import CPU
from tests.selections import kept_experts
from tests.stock_mixtures import tiny_mixture
from tests.tiny import change_config, write_plain_tokenizer


def saved(folder: Path, model_type: str, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    write_plain_tokenizer(folder)
    tiny_mixture(model_type, **config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"), "qwen3_moe")


def texts(options: CollectOptions) -> Texts:
    return Texts(TEXTS, options)


def in_memory(path: Path, options: CollectOptions = OPTIONS, dtype: str = "float32") -> GateStatistics:
    return test_layerwise.in_memory(path, options, dtype, texts)


whole = functools.cache(in_memory)


def by_layer(
    path: Path, options: CollectOptions = OPTIONS, dtype: str = "float32", **more: Any
) -> GateStatistics:
    kind = getattr(torch, dtype)
    return test_layerwise.by_layer(path, options, material=texts, dtype=kind, **more)


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "granitemoehybrid", "lfm2_moe"]
)
def test_every_family(model_type, tmp_path):
    saved(tmp_path, model_type)
    # Where a class keeps some of its weights in float32, another type than that of the files tells; but of weights
    # that lie the other way around, products in bfloat16 depend on where in memory they are.
    dtype = "float32" if model_type == "gpt_oss" else "bfloat16"
    assert_same(by_layer(tmp_path, dtype=dtype), in_memory(tmp_path, dtype=dtype))


@pytest.mark.parametrize(("dtype", "batch_tokens"), [("float32", 1), ("float16", 24), ("float32", 4096)])
def test_in_other_types_and_batches(path, dtype, batch_tokens):
    options = CollectOptions(batch_tokens=batch_tokens, context=8)
    report = RunReport()
    assert_same(by_layer(path, options, dtype, report=report), whole(path, options, dtype))
    with open_model(path) as checkpoint:
        output = checkpoint.info("lm_head.weight").nbytes
        assert report.readings == 1
        assert 0 < report.bytes_read <= checkpoint.total_bytes - output


def test_a_tied_model_of_which_experts_were_removed(tmp_path):
    source = saved(tmp_path / "whole", "mixtral", tie_word_embeddings=True)
    pruned = tmp_path / "pruned"
    with open_model(source) as opened:
        kept = {layer.name: (1, 2, 4, 7) for layer in opened.mixtures}
        apply(opened, cut(opened, kept_experts(kept)), pruned)
    found = by_layer(pruned)
    assert_same(found, in_memory(pruned))
    assert found.entries["code"].routed[0].nonzero()[0].tolist() == [1, 2, 4, 7]


def test_layers_that_predict_further_tokens_are_not_run(tmp_path):
    source = saved(tmp_path, "deepseek_v3")
    expected = in_memory(source)
    tensors = load_file(source / "model.safetensors")
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    more = {name.replace("layers.2", "layers.3"): tensor + 1 for name, tensor in last.items()}
    save_file({**tensors, **more}, source / "model.safetensors", {"format": "pt"})
    assert by_layer(source).to_json()["entries"] == expected.to_json()["entries"]


def test_an_expert_that_no_token_goes_to_is_not_read(path):
    found, report = whole(path, CollectOptions(max_tokens=1)), RunReport()
    by_layer(path, CollectOptions(max_tokens=1), report=report)
    with open_model(path) as checkpoint:
        routed = sum(entry.routed for entry in found.entries.values())
        expected = checkpoint.total_bytes - checkpoint.info("lm_head.weight").nbytes
        for layer, counts in zip(checkpoint.mixtures, routed, strict=True):
            expected -= sum(
                checkpoint.info(layer.expert_tensor(expert, suffix)).nbytes
                for expert in range(layer.num_experts)
                for suffix in layer.expert_tensors
                if not counts[expert]
            )
    assert report.bytes_read == expected


def test_a_checkpoint_that_lacks_a_layer_of_config_json_is_refused(tmp_path):
    deeper = saved(tmp_path, "qwen3_moe")
    change_config(deeper, num_hidden_layers=4, mlp_only_layers=[1, 3])
    with (
        open_model(deeper) as checkpoint,
        pytest.raises(CheckpointError, match=r"missing \(model"),
    ):
        make_model(checkpoint, CPU, torch.float32)
