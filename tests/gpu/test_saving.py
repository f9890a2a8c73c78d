"""Weights on their way from a GPU to a file."""

import torch
from safetensors.torch import load_file

from prunecli.modules.saving import save_tensors


def test_tensor_after_tensor(gpu, tmp_path):
    """safetensors reads back each tensor of a GPU, whatever its type and shape."""
    held = {
        "half": torch.randn(3, 5).half(),
        "turned": torch.randn(4, 3).t(),
        "one": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "counts": torch.arange(3),
        "bf16": torch.randn(7).bfloat16(),
    }
    with gpu:
        there = {name: tensor.to(gpu.device) for name, tensor in held.items()}
        save_tensors(there, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == held.keys()
    for name, tensor in held.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
