"""Linear layers on CPU threads against the product in float64, on every way that a type and a size may take."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from prunecli.modules import cpu_linear
from prunecli.modules.cpu_linear import (
    InferenceLinear,
    PackedLinear,
    can_pack,
    dot_products,
    has_onednn_linear,
    linear,
    pack_linears,
    padded_rows,
    speed_up_linears,
)
from prunecli.modules.loading import load_for_decoding
from tests.families import DECODERS, TRANSLATORS
from tests.families.records import own_branches
from tests.opening import load
from tests.tiny import tiny_nllb_moe

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("large", [False, True])
def test_equals_the_product(dtype, rows, large, monkeypatch):
    if large:  # as if these weights were large: oneDNN
        monkeypatch.setattr(cpu_linear, "MIN_ONEDNN", 1)
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.rand(shape, generator=generator).sub(0.5).to(dtype) for shape in [(rows, 32), (24, 32), (24,)]
    )
    want = x.double() @ weight.double().T + bias.double()
    with torch.inference_mode(), dot_products(dtype, [rows]):
        made = linear(x, weight, bias)
    torch.testing.assert_close(made[:rows].double(), want, atol=TOLERANCE[dtype], rtol=0)


@given(st.integers(1, 5000))
def test_padding_is_small_and_never_negative(rows):
    assert rows <= padded_rows(rows) <= rows * 1.34
    assert padded_rows(padded_rows(rows)) == padded_rows(rows)


@pytest.mark.parametrize(
    ("dtype", "counts", "switched"),
    [(torch.bfloat16, [1, 2, 2], True), (torch.bfloat16, [2, 2], False), (torch.float32, [1, 1], False)],
)
def test_onednn_is_off_for_single_rows_only(dtype, counts, switched, monkeypatch):
    monkeypatch.setattr(cpu_linear, "onednn_bfloat16", lambda: True)
    before = torch.backends.mkldnn.enabled
    with dot_products(dtype, counts):
        assert torch.backends.mkldnn.enabled == (before and not switched)
        with dot_products(dtype, counts):
            pass
        assert torch.backends.mkldnn.enabled == (before and not switched)
    assert torch.backends.mkldnn.enabled == before


def test_a_failure_switches_onednn_back(monkeypatch):
    monkeypatch.setattr(cpu_linear, "onednn_bfloat16", lambda: True)
    before = torch.backends.mkldnn.enabled
    with pytest.raises(RuntimeError, match="failed"), dot_products(torch.bfloat16, [1]):
        raise RuntimeError("failed")
    assert torch.backends.mkldnn.enabled == before


pytestmark = pytest.mark.skipif(
    not (has_onednn_linear() and can_pack(torch.float32)),
    reason="this torch has no oneDNN, or packs no weights",
)


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Every layer is large enough."""
    monkeypatch.setattr(cpu_linear, "MIN_ONEDNN", 1)


@pytest.fixture
def calls(monkeypatch):
    """An entry for each product that goes to oneDNN."""
    made = []
    asked = InferenceLinear._goes_to_onednn

    def noted(self, given):
        goes = asked(self, given)
        made.extend([1] * goes)
        return goes

    monkeypatch.setattr(InferenceLinear, "_goes_to_onednn", noted)
    return made


def test_gradients_are_those_of_the_stock_layer(calls):
    made = nn.Sequential(nn.Linear(24, 16))
    speed_up_linears(made)
    fast, stock = made[0], nn.Linear(24, 16)
    assert type(fast) is InferenceLinear
    stock.load_state_dict(fast.state_dict())
    for one in (fast, stock):
        one(torch.ones(3, 24)).square().sum().backward()
    assert torch.equal(fast.weight.grad, stock.weight.grad)
    assert not calls
    frozen = fast.requires_grad_(False)
    x = torch.ones(3, 24, requires_grad=True)
    frozen(x).sum().backward()
    assert x.grad is not None
    assert not calls


def test_a_loaded_model_decodes_as_before(calls):
    path = tiny_nllb_moe("model")
    ids = torch.tensor([[5, 6, 7, 2]])
    fast = load(path)
    made = fast.generate(ids, num_beams=2, max_new_tokens=6)
    assert calls
    cpu_linear.MIN_ONEDNN = 1 << 30  # the fixture undoes it
    stock = load(path)
    assert not any(isinstance(module, InferenceLinear) for module in stock.modules())
    assert torch.equal(made, stock.generate(ids, num_beams=2, max_new_tokens=6))
    assert fast.state_dict().keys() == stock.state_dict().keys()


def packed_layer(
    inputs: int, outputs: int, bias: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(inputs, outputs, bias=bias, dtype=dtype))
    pack_linears(made)
    return made[0]


@pytest.mark.parametrize(("dtype", "atol", "rtol"), [(torch.float32, 2e-5, 0), (torch.bfloat16, 1e-3, 2**-8)])
@given(
    shape=st.sampled_from(((), (2, 1))),
    rows=st.integers(0, 70),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    stride=st.integers(1, 2),
)
def test_packed_equals_the_product_rounded_once(
    dtype, atol, rtol, shape, rows, inputs, outputs, bias, stride
):
    if not can_pack(dtype):
        pytest.skip("no such products on this CPU")
    packed = packed_layer(inputs, outputs, bias, dtype)
    assert type(packed) is PackedLinear
    x = torch.randn(*shape, rows, stride * inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = x[..., ::stride]
    with torch.inference_mode():
        made = packed(x)
    want = x.double() @ packed.weight.to_dense().double().T + (packed.bias.double() if bias else 0)
    assert made.dtype == dtype
    torch.testing.assert_close(made.double(), want.detach(), atol=atol, rtol=rtol)


def test_tied_small_other_types_and_subclasses_stay(monkeypatch):
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([nn.Embedding(64, 32), nn.Linear(32, 64), Own(32, 64), nn.Linear(32, 32)])
    model.extend([nn.Linear(32, 64).double(), nn.Linear(32, 64)])
    model[1].weight = model[0].weight
    monkeypatch.setattr(cpu_linear, "MIN_ONEDNN", 32 * 64)
    pack_linears(model)
    kinds = [nn.Embedding, nn.Linear, Own, nn.Linear, nn.Linear, PackedLinear]
    assert [type(module) for module in model] == kinds


@pytest.mark.parametrize("model_type", [*own_branches([*TRANSLATORS, *DECODERS]), "qwen3", "gemma3_text"])
def test_families_decode_the_same(model_type, models):
    path = models[model_type]
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 2]])
    packed = load_for_decoding(path, device="cpu", dtype="float32")
    stock = load(path)
    # GPT-2 has layers of its own in the place of nn.Linear, and a tied output
    assert any(isinstance(module, PackedLinear) for module in packed.modules()) == (model_type != "gpt2")
    made, want = (
        model.generate(ids, num_beams=3, do_sample=False, max_new_tokens=8, return_dict_in_generate=True)
        for model in (packed, stock)
    )
    torch.testing.assert_close(made.sequences_scores, want.sequences_scores, atol=1e-4, rtol=0)
    assert torch.equal(made.sequences, want.sequences)
