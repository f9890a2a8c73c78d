"""Dense layers on a CPU: the product in float64, and nn.Linear itself where gradients flow."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import prunecli
from prunecli.modules import inference_linear
from prunecli.modules.cpu_linear import has_onednn_linear
from prunecli.modules.inference_linear import InferenceLinear, speed_up_linears
from tests.tiny import tiny_nllb_moe

pytestmark = pytest.mark.skipif(not has_onednn_linear(), reason="this torch has no oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every layer is large enough; an entry for each product that goes to oneDNN."""
    monkeypatch.setattr(inference_linear, "MIN_ONEDNN", 1)
    made: list[int] = []
    asked = InferenceLinear._goes_to_onednn

    def noted(self: InferenceLinear, given: torch.Tensor) -> bool:
        goes = asked(self, given)
        made.extend([1] * goes)
        return goes

    monkeypatch.setattr(InferenceLinear, "_goes_to_onednn", noted)
    return made


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(24, 16, bias=bias))
    speed_up_linears(made)
    assert type(made[0]) is InferenceLinear
    return made[0]


@pytest.mark.parametrize("shape", [(24,), (1, 24), (5, 24), (2, 3, 24), (2, 1, 4, 24), (0, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_product(shape: tuple[int, ...], bias: bool, calls: list[int]) -> None:
    fast, x = layer(bias), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        made = fast(x)
    want = x.double() @ fast.weight.double().T + (fast.bias.double() if bias else 0)
    assert made.shape == (*shape[:-1], 16)
    torch.testing.assert_close(made.double(), want.detach(), atol=1e-5, rtol=0)
    assert len(calls) == (0 not in shape)


def test_strided_input(calls: list[int]) -> None:
    fast, x = layer(), torch.randn(24, 2, 5).permute(1, 2, 0)
    with torch.inference_mode():
        made = fast(x)
    torch.testing.assert_close(made, nn.functional.linear(x, fast.weight, fast.bias), atol=1e-5, rtol=0)
    assert calls


def test_gradients_are_those_of_the_stock_layer(calls: list[int]) -> None:
    fast = layer()
    stock = nn.Linear(24, 16)
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


def test_other_types_and_autocast_are_left_to_torch(calls: list[int]) -> None:
    fast, x = layer(), torch.randn(3, 24)
    with torch.inference_mode():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert fast(x).dtype == torch.bfloat16
        assert copy.deepcopy(fast).to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
        assert not calls
        fast(x)
    assert calls


def test_small_layers_and_other_classes_stay() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(24, 16), Own(1024, 1024), nn.Linear(1024, 1024))
    speed_up_linears(model)
    assert [type(module) for module in model] == [nn.Linear, Own, InferenceLinear]


def test_a_loaded_model_decodes_as_before(tmp_path: Path, calls: list[int]) -> None:
    path = tiny_nllb_moe(tmp_path / "model")
    ids = torch.tensor([[5, 6, 7, 2]])
    fast = prunecli.load_model(path, device="cpu", dtype="float32")
    made = fast.generate(ids, num_beams=2, max_new_tokens=6)
    assert calls
    inference_linear.MIN_ONEDNN = 1 << 30  # the fixture undoes it
    stock = prunecli.load_model(path, device="cpu", dtype="float32")
    assert not any(isinstance(module, InferenceLinear) for module in stock.modules())
    assert torch.equal(made, stock.generate(ids, num_beams=2, max_new_tokens=6))
    assert fast.state_dict().keys() == stock.state_dict().keys()
