"""Masks on single heads, against attention spelled out head by head; layers that have no head left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prunecli.model.checkpoint import open_model
from prunecli.model.patchwork import NoHeads, OnlyBias
from prunecli.modules.hooks import masked_heads
from prunecli.modules.loading import load_model
from tests.tiny import tiny_nllb_moe

NAME = "model.encoder.layers.0.self_attn"


@pytest.fixture
def source(tmp_path):
    return tiny_nllb_moe(tmp_path / "tiny", layers=2)


def by_hand(attention: Any, x: torch.Tensor, masks: list[float]) -> torch.Tensor:
    """MHAtt(x) = sum_h xi_h Att_h(x) + bias (1905.10650, 2.3), one head at a time."""
    width = attention.head_dim
    total = attention.out_proj.bias.clone()
    for head, mask in enumerate(masks):
        rows = slice(head * width, (head + 1) * width)
        q, k, v = (
            x @ projection.weight[rows].T + projection.bias[rows]
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        context = torch.softmax(q @ k.transpose(-1, -2) / width**0.5, dim=-1) @ v
        total = total + mask * (context @ attention.out_proj.weight[:, rows].T)
    return total


@pytest.mark.parametrize("masks", [[0.0, 0.0], [0.5, 2.0]])
def test_a_mask_weighs_its_head(source, masks):
    model = load_model(source, device="cpu")
    with open_model(source) as checkpoint:
        layers = checkpoint.layout.attentions
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    attention = model.get_submodule(NAME)
    with torch.no_grad(), masked_heads(model, layers, {NAME: torch.tensor(masks)}):
        made = attention(x)[0]
    with torch.no_grad():
        torch.testing.assert_close(made, by_hand(attention, x, masks))
        torch.testing.assert_close(attention(x)[0], by_hand(attention, x, [1.0, 1.0]))  # no hook is left


def test_without_heads_only_the_bias_remains():
    stock = torch.nn.Linear(4, 6)
    with torch.no_grad():
        stock.bias.copy_(torch.arange(6.0))
    assert torch.equal(OnlyBias(stock, 6)(torch.ones(2, 3, 4)), torch.arange(6.0).expand(2, 3, 6))
    unbiased = torch.nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
    assert torch.equal(OnlyBias(unbiased, 6)(torch.ones(2, 4)), torch.zeros(2, 6))
    assert torch.equal(NoHeads(unbiased, 8)(torch.ones(2, 3, 6)), torch.zeros(2, 3, 8, dtype=torch.bfloat16))
    assert torch.equal(
        NoHeads(torch.nn.Embedding(5, 8), 2)(torch.ones(3, 4, dtype=torch.long)), torch.zeros(3, 4, 2)
    )
    assert not list(NoHeads(stock, 8).parameters())
