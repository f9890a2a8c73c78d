"""How often the host waits for a GPU, at most: after each wait the device idles until its next kernel is started."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from prunecli.modules.loading import load_model
from prunecli.modules.sparse_ffn import SparseFFN
from tests.gpu.conftest import Gpu
from tests.gpu.pretend import Pretend
from tests.tiny import tiny_nllb_moe

SPARSE_CALL = 5
"""Of one sparse FFN with padding."""

STEP = 2
"""Of a decoding step, beside its sparse FFNs: transformers' own."""

SPARSE_STEP = 5
"""Of each sparse FFN of a decoding step."""


def ours(waits: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{what} {where}: {times}" for (what, where), times in waits.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
def test_of_a_sparse_ffn(gpu: Gpu, dtype: torch.dtype, padded: bool) -> None:
    torch.manual_seed(0)
    module = SparseFFN(32, 64, 8, dtype=dtype).eval()
    states = torch.randn(2, 6, 32).to(dtype)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2]) if padded else None
    with torch.no_grad():
        want = module(states, mask)
        with gpu:
            module, states = module.to(gpu.device), states.to(gpu.device)
            mask = None if mask is None else mask.to(gpu.device)
            module(states, mask)  # what is only done once
            gpu.reset()
            made = module(states, mask)
            waits = Counter(gpu.waits)
            assert not gpu.uploads, ours(gpu.uploads)
            made = made.cpu()
    assert sum(waits.values()) <= SPARSE_CALL - (not padded), ours(waits)
    exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(made, want, **exact)


def test_of_a_decoding_step(gpu: Gpu, tmp_path: Path) -> None:
    path = tiny_nllb_moe(tmp_path / "moe")
    sparse = 2  # of the decoder's four layers
    tokens, real = torch.tensor([[5, 6, 7, 8, 2], [5, 6, 2, 1, 1]]), torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    search = {"num_beams": 2, "max_new_tokens": 6, "min_new_tokens": 6, "forced_bos_token_id": 7}
    want = load_model(path, device="cpu", dtype="float32").generate(
        input_ids=tokens, attention_mask=real, **search
    )
    steps: list[Counter[tuple[str, str]]] = []
    with gpu:
        model = load_model(path, device=gpu.device, dtype="float32")
        there = {"input_ids": tokens.to(gpu.device), "attention_mask": real.to(gpu.device)}

        def note(*_: object) -> None:
            steps.append(Counter(gpu.waits))
            gpu.reset()

        model.model.decoder.register_forward_pre_hook(note)
        found = model.generate(**there, **search).cpu()
    assert torch.equal(found, want) or not isinstance(gpu, Pretend)
    assert len(steps) == 6
    for waits in steps[2:]:  # the first steps are the encoder's and the prompt's
        assert 0 < sum(waits.values()) <= STEP + sparse * SPARSE_STEP, ours(waits)
