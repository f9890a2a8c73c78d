"""The sparse FFN against equations 1 and 2, restated slowly in tests/reference/routing.py."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prunecli.modules import stock_experts
from prunecli.modules.sparse_ffn import SparseFFN
from tests.reference import routing as reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def make(experts: int = 6, dtype: torch.dtype = torch.float32, **options: float) -> SparseFFN:
    torch.manual_seed(1)
    return SparseFFN(8, 12, experts, **options).to(dtype).eval()


def expected(module: SparseFFN, tokens: torch.Tensor, token_dropout: float = 0.0) -> torch.Tensor:
    parts = module.fc1_weight, module.fc1_bias, module.fc2_weight, module.fc2_bias
    return reference.sparse_ffn(tokens, module.router.classifier.weight, parts, token_dropout)


assert_near = partial(torch.testing.assert_close, rtol=0, check_dtype=False)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gradients", [False, True])
def test_equals_equation_2(dtype, gradients):
    module, x = make(dtype=dtype), torch.randn(3, 5, 8).to(dtype)
    with torch.set_grad_enabled(gradients):
        y = module(x)
    assert y.dtype == dtype
    assert_near(y, expected(module, x.reshape(-1, 8)).reshape(3, 5, 8), atol=TOLERANCE[dtype])


def test_token_dropout_scales_at_inference():
    module, x = make(token_dropout=0.2), torch.randn(1, 7, 8)
    with torch.inference_mode():
        assert_near(module(x)[0], expected(module, x[0], 0.2), atol=1e-5)


def masks() -> dict[str, torch.Tensor]:
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    allowed = real.bool()[:, None, None, :].expand(2, 1, 4, 4)
    causal = allowed & torch.ones(4, 4).tril().bool()
    minus = torch.finfo(torch.float32).min
    return {
        "2-D": real,
        "bool": allowed,
        "causal bool": causal,
        "additive": torch.where(allowed, 0.0, minus),
        "causal additive": torch.where(causal, 0.0, minus),
    }


@pytest.mark.parametrize("name", masks())
def test_padding_is_neither_computed_nor_observed(name):
    module, x = make(), torch.randn(2, 4, 8)
    x[1, 2:] = float("nan")  # would spread if it were computed
    seen = []
    module.observer = lambda *routing: seen.append(routing)
    with torch.inference_mode():
        y = module(x, masks()[name])
    want = expected(module, torch.cat([x[0], x[1, :2]]))
    assert_near(torch.cat([y[0], y[1, :2]]), want, atol=1e-5)
    assert (y[1, 2:] == 0).all()
    assert len(seen) == 1
    assert seen[0][0].shape == (6, 6)


@pytest.mark.parametrize("in_threads", [False, True])
def test_gradients_are_those_of_the_plain_formula(in_threads, monkeypatch):
    monkeypatch.setattr(stock_experts, "pays", lambda *_: in_threads)
    module, x = make(20).double(), torch.randn(1, 6, 8, dtype=torch.float64, requires_grad=True)
    module.router.classifier.float()
    parameters = [x, *module.parameters()]
    ours = torch.autograd.grad(module(x).square().sum(), parameters)
    want = torch.autograd.grad(expected(module, x[0]).square().sum(), parameters)
    assert_near(ours, want, atol=1e-5)
    assert not all(gradient.any() for gradient in ours[2])  # of experts without rows


@pytest.mark.parametrize("gradients", [False, True])
def test_autocast_computes_the_experts_in_its_type(gradients):
    module, x = make(), torch.randn(1, 9, 8)
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.float32
    assert_near(y[0], expected(module, x[0]), atol=3e-2)


@settings(max_examples=40)
@given(st.integers(0, 40), st.integers(2, 9), st.integers(0, 2**31))
def test_any_batch_is_what_its_tokens_are_alone(tokens, experts, seed):
    module = make(experts)
    x = torch.randn(1, tokens, 8, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        together = module(x)
        assert torch.equal(together, module(x))
        for t in range(tokens):
            assert_near(module(x[:, t : t + 1])[0, 0], together[0, t], atol=1e-6)
