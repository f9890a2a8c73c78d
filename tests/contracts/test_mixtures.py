"""Expert pruning of mixture-of-experts language models: the stock class opens the result, which is the masked model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from prunecli.architectures import EXPERTS_ONLY
from prunecli.methods.experts.plan import ExpertPlan
from prunecli.methods.experts.rewrite import rewrite_experts
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.pipeline import apply
from tests.families.mixtures import EXPERTS, TINY


def stock_class(model_type: str) -> Any:
    import transformers

    return getattr(transformers, EXPERTS_ONLY[model_type].model_class)


def save_tiny(directory: Path, model_type: str) -> Path:
    """A tiny model of the stock class with random weights, biases of its routers too."""
    from transformers import CONFIG_MAPPING

    torch.manual_seed(7)
    model = stock_class(model_type)(CONFIG_MAPPING[model_type](**TINY[model_type])).eval()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if "bias" in name and value.shape[-1:] == (EXPERTS,):
            value.data.uniform_(-0.1, 0.1)
        elif value.dim() == 2 and len(value) == EXPERTS:
            value.data.normal_()  # routers that tell tokens apart
    model.save_pretrained(directory)
    return directory


def choose(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Other experts in every layer, as many in each; of each group as many."""
    kept = {}
    for number, layer in enumerate(checkpoint.mixtures):
        width = layer.num_experts // layer.groups.count
        left = width - max(2 // layer.groups.count, 1)
        kept[layer.name] = tuple(
            group * width + place
            for group in range(layer.groups.count)
            for place in sorted((number + group + step) % width for step in range(left))
        )
    return kept


def logits(model: Any, model_type: str) -> Tensor:
    torch.manual_seed(3)
    ids = torch.randint(3, 64, (2, 9))
    extra = {"decoder_input_ids": ids.flip(1)} if model_type == "switch_transformers" else {}
    with torch.no_grad():
        result: Tensor = model(input_ids=ids, **extra).logits
    return result


@contextmanager
def without(model: Any, checkpoint: Checkpoint, kept: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """The model with the dropped experts' router logits, and correction biases, at minus infinity."""
    values = dict((*model.named_parameters(), *model.named_buffers()))
    dropped: dict[int, list[int]] = {}
    for layer in checkpoint.mixtures:
        gone = [number for number in range(layer.num_experts) if number not in kept[layer.name]]
        for name in layer.cut:
            if name in layer.stacked_tensors:
                continue
            own = next(value for value in values.values() if is_equal(value, checkpoint, name))
            if name in layer.router_tensors and own.dim() == 2:
                dropped[id(own)] = gone
            elif name not in layer.router_tensors:
                own.data[(*[slice(None)] * (own.dim() - 1), gone)] = -torch.inf
    used = set()
    stock = functional.linear

    def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result = stock(hidden, weight, bias)
        if id(weight) in dropped:
            used.add(id(weight))
            result[..., dropped[id(weight)]] = -torch.inf
        return result

    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = stock
    assert used == set(dropped)


def is_equal(value: Tensor, checkpoint: Checkpoint, name: str) -> bool:
    info = checkpoint.info(name)
    if value.numel() != info.numel:
        return False
    data = checkpoint.read_range(name, 0, info.nbytes, bytearray(info.nbytes))
    stored = torch.frombuffer(data, dtype=value.dtype)
    return torch.equal(value.detach().reshape(-1), stored)


@pytest.mark.parametrize("model_type", TINY)
def test_the_stock_class_opens_the_masked_model(model_type: str, tmp_path: Path) -> None:
    source, output = save_tiny(tmp_path / "source", model_type), tmp_path / "pruned"
    with open_model(source) as checkpoint:
        kept = choose(checkpoint)
        assert kept
        assert all(len(ids) < EXPERTS for ids in kept.values())
        apply(checkpoint, rewrite_experts(checkpoint, ExpertPlan(kept)), output)
        model, info = stock_class(model_type).from_pretrained(output, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        full = stock_class(model_type).from_pretrained(source).eval()
        before = logits(full, model_type)
        with without(full, checkpoint, kept):
            expected = logits(full, model_type)
    pruned = logits(model.eval(), model_type)
    assert not torch.equal(pruned, before)
    torch.testing.assert_close(pruned, expected, rtol=0, atol=1e-6)


def to_float8(directory: Path) -> None:
    """Experts in blocks of float8 with their scales, as DeepSeek and Qwen publish them."""
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    modules = ["lm_head", "self_attn", "gate"]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": modules,
    }
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))


def test_experts_in_float8_stay_as_they_are(tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config

    source, output = save_tiny(tmp_path / "source", "mixtral"), tmp_path / "pruned"
    to_float8(source)
    settings = FineGrainedFP8Config(
        dequantize=True, weight_block_size=(128, 128), modules_to_not_convert=["lm_head", "self_attn", "gate"]
    )

    def opened(path: Path) -> Any:
        return stock_class("mixtral").from_pretrained(path, quantization_config=settings).float().eval()

    with open_model(source) as checkpoint:
        kept = choose(checkpoint)
        apply(checkpoint, rewrite_experts(checkpoint, ExpertPlan(kept)), output)
        full = opened(source)
        before = logits(full, "mixtral")
        with without(full, checkpoint, kept):
            expected = logits(full, "mixtral")
    assert json.loads((output / "config.json").read_text())["dtype"] == "float32"
    pruned = logits(opened(output), "mixtral")
    assert not torch.equal(pruned, before)
    torch.testing.assert_close(pruned, expected, rtol=0, atol=1e-6)
