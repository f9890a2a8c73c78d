"""Linear layers on CPU threads against the product in float64, on every way that a type and a size may take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prunecli.modules import cpu_linear
from prunecli.modules.cpu_linear import dot_products, linear, padded_rows

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 70])
@pytest.mark.parametrize("large", [False, True])
def test_equals_the_product(
    dtype: torch.dtype, rows: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # as if these weights were large: oneDNN, and casts in several blocks with a remainder
        monkeypatch.setattr(cpu_linear, "MIN_ONEDNN", 1)
        monkeypatch.setattr(cpu_linear, "CAST_ELEMENTS", 32 * 10)
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.rand(shape, generator=generator).sub(0.5).to(dtype) for shape in [(rows, 32), (24, 32), (24,)]
    )
    want = x.double() @ weight.double().T + bias.double()
    with torch.inference_mode(), dot_products(dtype, [rows]):
        made = linear(x, weight, bias)
    torch.testing.assert_close(made[:rows].double(), want, atol=TOLERANCE[dtype], rtol=0)


@given(st.integers(1, 5000))
def test_padding_is_small_and_never_negative(rows: int) -> None:
    assert rows <= padded_rows(rows) <= rows * 1.34
    assert padded_rows(padded_rows(rows)) == padded_rows(rows)


def test_padding_leaves_few_shapes() -> None:
    assert len({padded_rows(rows) for rows in range(1, 257)}) == 8 + 14 + 24


@pytest.mark.parametrize(
    ("dtype", "counts", "switched"),
    [
        (torch.bfloat16, [1, 2, 2], True),
        (torch.bfloat16, [2, 2], False),
        (torch.float32, [1, 1], False),
    ],
)
def test_onednn_is_off_for_single_rows_only(
    dtype: torch.dtype, counts: list[int], switched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "onednn_bfloat16", lambda: True)
    before = torch.backends.mkldnn.enabled
    with dot_products(dtype, counts):
        assert torch.backends.mkldnn.enabled == (before and not switched)
        with dot_products(dtype, counts):
            pass
        assert torch.backends.mkldnn.enabled == (before and not switched)
    assert torch.backends.mkldnn.enabled == before


def test_a_failure_switches_onednn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "onednn_bfloat16", lambda: True)
    before = torch.backends.mkldnn.enabled
    with pytest.raises(RuntimeError, match="failed"), dot_products(torch.bfloat16, [1]):
        raise RuntimeError("failed")
    assert torch.backends.mkldnn.enabled == before
