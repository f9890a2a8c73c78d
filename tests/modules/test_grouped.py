"""Experts on a CPU: what one makes of its rows does not depend on the others' rows, to the last bit.

A run layer by layer gives an expert the rows of one batch after another, and must make the sums of a whole layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from prunecli.modules import grouped, threads
from prunecli.modules.grouped import run_experts
from prunecli.modules.threads import in_threads

D_MODEL, FFN = 256, 1024


@pytest.fixture(params=[1, 3])
def several(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("counts", [[1, 5, 5], [1, 1, 5], [0, 2, 1, 9, 33], [7]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared_out", [False, True])
def test_an_expert_is_independent_of_the_others(
    shared_out: bool, dtype: torch.dtype, counts: list[int], several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "MIN_EXPERTS", 2 if shared_out else 99)
    monkeypatch.setattr(threads, "MIN_WEIGHT_BYTES", 0)
    torch.manual_seed(0)
    weights = tuple(
        (torch.randn(len(counts), *shape) * 0.05).to(dtype)
        for shape in ((FFN, D_MODEL), (FFN,), (D_MODEL, FFN), (D_MODEL,))
    )
    rows = torch.randn(sum(counts), D_MODEL).to(dtype)
    with torch.inference_mode():
        together = run_experts(rows, weights, counts, functional.relu)
        parts = list(rows.split(counts))
        made = [torch.empty(0)] * len(counts)

        def run(expert: int) -> None:
            own = tuple(tensor[expert : expert + 1] for tensor in weights)
            made[expert] = run_experts(parts[expert], own, [len(parts[expert])], functional.relu)

        if shared_out and several > 1 and sum(map(bool, counts)) > 1:
            in_threads(run, range(len(counts)))
        else:
            for expert in range(len(counts)):
                run(expert)
    assert torch.equal(together, torch.cat(made))
