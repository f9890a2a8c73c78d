"""Experts of stock classes run by prunecli: the same outputs, and norms as brute force has them."""

import pytest
import torch

from prunecli.errors import UnsupportedModelError
from prunecli.modules import stock_experts
from prunecli.modules.stock_experts import expert_modules, own_experts
from tests.stock_mixtures import OBSERVED, TAPPED, tiny_mixture

IDS = torch.randint(2, 64, (3, 17), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("model_type", OBSERVED)
def test_logits_are_the_stock_ones(model_type, monkeypatch):
    # In every other family the experts are shared out to threads.
    monkeypatch.setattr(stock_experts, "pays", lambda *_: OBSERVED.index(model_type) % 2 == 1)
    model = tiny_mixture(model_type)
    before = model.get_experts_implementation()
    stock = {}
    for name in ("eager", "grouped_mm"):
        model.set_experts_implementation(name)
        stock[name] = model(IDS).logits
    model.set_experts_implementation(before)
    with own_experts(model):
        own = model(IDS).logits
    assert model.get_experts_implementation() == before
    for logits in stock.values():
        assert own.std() > 0.01
        torch.testing.assert_close(own, logits, rtol=0, atol=4e-6 * float(logits.abs().max()))


def test_observers_and_implementation_are_gone_after_a_failure():
    model = tiny_mixture("mixtral")
    before = model.get_experts_implementation()

    def fail():
        with own_experts(model) as modules:
            for module in modules.values():
                module.observer = print
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model.get_experts_implementation() == before
    assert all(module.observer is None for module in expert_modules(model).values())


@pytest.mark.parametrize("model_type", TAPPED)
def test_families_with_experts_of_another_kind_are_refused(model_type):
    model = tiny_mixture(model_type)
    with pytest.raises(UnsupportedModelError, match=type(model).__name__), own_experts(model):
        pass
