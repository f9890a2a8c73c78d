"""Weights on their way to a GPU."""

import pytest
import torch

from prunecli.modules import filling
from prunecli.modules.devices import full_device
from prunecli.modules.loading import load_model
from prunecli.modules.machine import CONTEXT_BYTES, limited
from tests.gpu.conftest import Real
from tests.gpu.pretend import Pretend
from tests.tiny import tiny_nllb_moe


def test_chunk_by_chunk(gpu, tmp_path, monkeypatch):
    """The tensors equal those of a CPU: no chunk is overwritten too early, none is in memory that may move."""
    monkeypatch.setattr(filling, "CHUNK_BYTES", 1 << 10)
    path, dtype = tiny_nllb_moe(tmp_path / "moe"), "bfloat16"
    want = load_model(path, device="cpu", dtype=dtype).state_dict()
    with gpu:
        found = load_model(path, device=gpu.device, dtype=dtype).state_dict()
        assert found.keys() == want.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor.cpu(), want[name]), name
    if isinstance(gpu, Pretend):
        assert not gpu.timeline.overwritten


def test_no_more_than_is_given(gpu):
    """torch refuses more than `--memory`, as if the card had no more; afterwards it may be had."""
    with gpu:
        before = torch.cuda.memory_allocated() if isinstance(gpu, Real) else 0  # by tests in this process
        with limited(torch.device("cuda"), CONTEXT_BYTES + before + (64 << 20)):
            held = torch.empty(40 << 20, dtype=torch.uint8, device=gpu.device)
            with pytest.raises(torch.OutOfMemoryError) as raised:
                torch.empty_like(held)
        assert (full_device(raised.value) or "").startswith("cuda:0 (")
        assert torch.empty_like(held).is_cuda
