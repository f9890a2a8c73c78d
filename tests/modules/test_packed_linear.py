"""Packed dense layers: the product in float64, what stays as it is, and the same decoding as the model's own layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import prunecli
from prunecli.evaluation.hardware import model_sizes
from prunecli.modules import packed_linear
from prunecli.modules.cpu_linear import can_pack
from prunecli.modules.loading import load_for_decoding
from prunecli.modules.packed_linear import PackedLinear, pack_linears
from tests.families import DECODERS, TRANSLATORS, tiny_family
from tests.tiny import tiny_nllb_moe

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch packs no weights")


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "MIN_ONEDNN", 1)


def layer(inputs: int, outputs: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(inputs, outputs, bias=bias, dtype=dtype))
    pack_linears(made)
    return made[0]


@given(rows=st.integers(0, 70), inputs=st.integers(1, 70), outputs=st.integers(1, 70), bias=st.booleans())
def test_equals_the_product(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    packed = layer(inputs, outputs, bias)
    assert type(packed) is PackedLinear
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        made = packed(x)
    want = x.double() @ packed.weight.to_dense().double().T + (packed.bias.double() if bias else 0)
    torch.testing.assert_close(made.double(), want.detach(), atol=2e-5, rtol=0)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="no bfloat16 on this CPU")
def test_bfloat16_equals_the_product_rounded_once() -> None:
    packed = layer(64, 48, dtype=torch.bfloat16)
    assert type(packed) is PackedLinear
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        made = packed(x)
    want = x.double() @ packed.weight.to_dense().double().T + packed.bias.double()
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.double(), want.detach(), atol=1e-3, rtol=2**-8)


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 24), (2, 1, 4, 24), (2, 0, 24)])
def test_shapes_and_strides(shape: tuple[int, ...]) -> None:
    packed, x = layer(24, 16), torch.randn(*shape[:-1], 48)[..., ::2]
    with torch.inference_mode():
        made = packed(x)
    want = nn.functional.linear(x, packed.weight.to_dense(), packed.bias)
    torch.testing.assert_close(made, want.detach(), atol=1e-5, rtol=0)


def test_values_and_number_of_parameters_stay() -> None:
    stock = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8, bias=False))
    before = model_sizes(stock)
    weights = [module.weight.detach().clone() for module in stock]
    pack_linears(stock)
    assert model_sizes(stock) == before
    assert all(torch.equal(m.weight.to_dense(), weight) for m, weight in zip(stock, weights, strict=True))


def test_tied_small_other_types_and_subclasses_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([nn.Embedding(64, 32), nn.Linear(32, 64), Own(32, 64), nn.Linear(32, 32)])
    model.extend([nn.Linear(32, 64).double(), nn.Linear(32, 64)])
    model[1].weight = model[0].weight
    monkeypatch.setattr(packed_linear, "MIN_ONEDNN", 32 * 64)
    pack_linears(model)
    kinds = [nn.Embedding, nn.Linear, Own, nn.Linear, nn.Linear, PackedLinear]
    assert [type(module) for module in model] == kinds


def test_a_layer_that_stands_in_two_places_is_packed_once() -> None:
    shared = nn.Linear(24, 16)
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
    pack_linears(model)
    assert type(shared) is PackedLinear
    assert model[0][0] is model[1][0]


def test_gradients_are_refused() -> None:
    with pytest.raises(RuntimeError, match="load_model"):
        layer(24, 16)(torch.ones(1, 24, requires_grad=True))


@pytest.mark.parametrize("model_type", [*TRANSLATORS, *DECODERS])
def test_every_family_decodes_the_same(model_type: str, tmp_path: Path) -> None:
    path = tiny_family(tmp_path / "model", model_type)
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 2]])
    packed = load_for_decoding(path, device="cpu", dtype="float32")
    stock = prunecli.load_model(path, device="cpu", dtype="float32")
    # GPT-2 has layers of its own in the place of nn.Linear, and a tied output
    assert any(isinstance(module, PackedLinear) for module in packed.modules()) == (model_type != "gpt2")
    made, want = (
        model.generate(ids, num_beams=3, do_sample=False, max_new_tokens=8, return_dict_in_generate=True)
        for model in (packed, stock)
    )
    torch.testing.assert_close(made.sequences_scores, want.sequences_scores, atol=1e-4, rtol=0)
    assert torch.equal(made.sequences, want.sequences)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_decodes_as_with_its_own_layers(tmp_path: Path, dtype: str) -> None:
    path = tiny_nllb_moe(tmp_path / "model")
    ids = torch.tensor([[5, 6, 7, 2]])
    packed = load_for_decoding(path, device="cpu", dtype=dtype)
    stock = prunecli.load_model(path, device="cpu", dtype=dtype)
    count = sum(isinstance(module, PackedLinear) for module in packed.modules())
    assert count == sum(
        isinstance(module, nn.Linear) and type(module).__name__ != "Router" for module in stock.modules()
    ) - (stock.lm_head.weight is stock.get_input_embeddings().weight)
    made = packed.generate(
        ids, num_beams=2, max_new_tokens=6, return_dict_in_generate=True, output_logits=True
    )
    want = stock.generate(
        ids, num_beams=2, max_new_tokens=6, return_dict_in_generate=True, output_logits=True
    )
    atol = 1e-4 if dtype == "float32" else 0.1
    torch.testing.assert_close(made.logits[0], want.logits[0], atol=atol, rtol=0)
    if dtype == "float32":
        assert torch.equal(made.sequences, want.sequences)
