"""Experts of stock classes run by prunecli: the same outputs, and norms as brute force has them."""

from __future__ import annotations

import pytest
import torch

from prunecli.errors import UnsupportedModelError
from prunecli.modules import stock_experts
from prunecli.modules.stock_experts import expert_modules, own_experts
from tests.modules.test_tapped_experts import observed
from tests.reference.stock_experts import every_output, expert_calls
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
        assert own.std() > 0.1
        torch.testing.assert_close(own, logits, rtol=0, atol=4e-6 * float(logits.abs().max()))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "granitemoe", "nemotron_h", "deepseek_v3"])
def test_norms_are_those_of_every_expert_on_every_token(model_type):
    model = tiny_mixture(model_type)
    model.set_experts_implementation("eager")
    calls = expert_calls(model, expert_modules(model), input_ids=IDS)
    uses = observed(model, input_ids=IDS)
    assert list(uses) == list(calls)
    assert len(calls) > 0
    for name, (hidden, experts, weights) in calls.items():
        norms = every_output(model.get_submodule(name), hidden).norm(dim=-1)  # [experts, tokens]
        use = uses[name]
        assert torch.equal(use.experts.sort().values, experts.sort().values)
        torch.testing.assert_close(use.weights.float().sort().values, weights.float().sort().values)
        torch.testing.assert_close(use.norms, norms.T.gather(1, use.experts), rtol=1e-5, atol=1e-6)


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
