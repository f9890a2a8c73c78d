"""Experts of classes that let nobody run them, observed: against one token and one expert at a time."""

from functools import partial
from typing import Any

import pytest
import torch

from prunecli.modules.stock_experts import ExpertUse
from prunecli.modules.tapped_experts import observed_experts
from tests.reference.stock_experts import block_inputs, llama4_tokens
from tests.stock_mixtures import tiny_mixture

IDS = torch.randint(2, 64, (3, 21), generator=torch.Generator().manual_seed(4))
FAMILIES = [
    ("llama4_text", {"num_experts_per_tok": 1}),
    ("llama4_text", {"num_experts_per_tok": 3}),
    ("switch_transformers", {"expert_capacity": 2}),
]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(("model_type", "config"), FAMILIES)
def test_logits_are_those_of_the_stock_class(model_type, config):
    model, inputs = tiny_mixture(model_type, **config), _inputs(model_type)
    stock = model(**inputs).logits
    with observed_experts(model):
        own = model(**inputs).logits
    torch.testing.assert_close(own, stock, rtol=1e-5, atol=1e-5)
    assert torch.equal(model(**inputs).logits, stock)


@pytest.mark.parametrize("model_type", ["llama4_text", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_round_as_often_as_stock(dtype, model_type):
    model = tiny_mixture(model_type).to(dtype)
    stock = model(IDS).logits
    with observed_experts(model):
        own = model(IDS).logits
    assert own.dtype == dtype
    torch.testing.assert_close(own, stock, rtol=0, atol=8 * torch.finfo(dtype).eps * float(stock.abs().max()))


@pytest.mark.parametrize("top_k", [1, 3])
def test_llama_4s_outputs_are_what_they_add_over_their_weight(top_k):
    model = tiny_mixture("llama4_text", num_experts_per_tok=top_k)
    blocks = block_inputs(model, "Llama4TextMoe", input_ids=IDS)
    uses = observed(model, input_ids=IDS)
    assert list(uses) == [f"{name}.experts" for name in blocks]
    for use, (block, hidden) in zip(uses.values(), blocks.values(), strict=True):
        experts, gates, norms = zip(*llama4_tokens(block, hidden, top_k), strict=True)
        assert use.experts.tolist() == [*experts]
        assert use.routed is None
        torch.testing.assert_close(use.weights, torch.tensor(gates))
        torch.testing.assert_close(use.norms, torch.tensor(norms), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", ["llama4_text", "switch_transformers"])
def test_taps_are_gone_after_a_failure(model_type):
    model = tiny_mixture(model_type)
    seen = []

    def fail():
        with observed_experts(model) as modules:
            for module in modules.values():
                module.observer = seen.append
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    model(**_inputs(model_type))
    assert not seen
    assert not any("forward" in vars(module) for module in model.modules())


def _inputs(model_type: str) -> dict[str, Any]:
    return {"input_ids": IDS, **({"decoder_input_ids": IDS.flip(1)} if "switch" in model_type else {})}


def observed(model: Any, **inputs: Any) -> dict[str, ExpertUse]:
    found = {}
    with observed_experts(model) as modules:
        for name, module in modules.items():
            module.observer = partial(found.__setitem__, name)
        model(**inputs)
    return found
