"""Products of many experts; on a CPU what one makes of its rows does not depend on the others' rows, to the last bit.

A run layer by layer gives an expert the rows of one batch after another, and must make the sums of a whole layer.
"""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from prunecli.modules import grouped
from prunecli.modules.grouped import dispatch, has_grouped_kernel, in_threads, pays
from prunecli.modules.sparse_ffn import SparseFFN
from prunecli.modules.stock_experts import ExpertWeights, outputs_of

D_MODEL, FFN = 256, 1024


@pytest.fixture(params=[1, 3])
def several(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("counts", [[1, 1, 5], [0, 2, 1, 9, 33]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared_out", [False, True])
def test_an_expert_is_independent_of_the_others(shared_out, dtype, counts, several, monkeypatch):
    monkeypatch.setattr(grouped, "MIN_EXPERTS", 2 if shared_out else 99)
    monkeypatch.setattr(grouped, "MIN_WEIGHT_BYTES", 0)
    torch.manual_seed(0)
    weights = tuple(
        (torch.randn(len(counts), *shape) * 0.05).to(dtype)
        for shape in ((FFN, D_MODEL), (D_MODEL, FFN), (FFN,), (D_MODEL,))
    )
    rows, module = torch.randn(sum(counts), D_MODEL).to(dtype), SparseFFN(1, 1, 1, top_k=1)

    def outputs(rows, held, counts):
        experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return outputs_of(module, rows, dispatch(experts[:, None], len(counts)), held)

    with torch.inference_mode():
        together = outputs(rows, ExpertWeights(*weights), counts)
        parts = list(rows.split(counts))
        made = [torch.empty(0)] * len(counts)

        def run(expert):
            own = ExpertWeights(*(tensor[expert : expert + 1] for tensor in weights))
            made[expert] = outputs(parts[expert], own, [len(parts[expert])])

        if shared_out and several > 1 and sum(map(bool, counts)) > 1:
            in_threads(run, range(len(counts)))
        else:
            for expert in range(len(counts)):
                run(expert)
    assert torch.equal(together, torch.cat(made))


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "fast"),
    [
        ((9, 0), torch.bfloat16, 64, True),
        ((10, 0), torch.bfloat16, 64, True),
        ((9, 0), torch.bfloat16, 60, False),  # rows of 120 bytes
        ((9, 0), torch.float16, 64, False),
        ((9, 0), torch.float32, 64, False),
        ((8, 0), torch.bfloat16, 64, False),
        ((12, 0), torch.bfloat16, 64, False),
    ],
)
def test_torch_multiplies_groups_only_where_it_is_fast(capability, dtype, width, fast, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    tokens = SimpleNamespace(device=torch.device("cuda:0"), dtype=dtype, element_size=lambda: dtype.itemsize)
    weight = torch.empty(4, 32, width, dtype=dtype, device="meta")
    assert has_grouped_kernel(cast(torch.Tensor, tokens), weight) is fast
    assert not has_grouped_kernel(torch.empty(2, width, dtype=dtype), weight)


three_threads = pytest.mark.parametrize("several", [3], indirect=True)


@three_threads
def test_each_item_once_without_gradients_each_thread_alone(several):
    seen = []
    in_threads(lambda item: seen.append((item, torch.get_num_threads(), torch.is_grad_enabled())), range(50))
    assert sorted(seen) == [(item, 1, False) for item in range(50)]


@three_threads
def test_a_failure_reaches_the_caller_and_stops_the_rest(several):
    begun = []

    def fail(item):
        begun.append(item)
        raise ValueError("at the first item")

    with pytest.raises(ValueError, match="at the first item"):
        in_threads(fail, range(1000))
    assert len(begun) <= 3  # at most one for each thread
    in_threads(begun.append, [1])  # the pool lives on


@three_threads
@pytest.mark.parametrize(
    ("experts", "rows", "per_expert", "worth"),
    [
        (32, 1, grouped.MIN_WEIGHT_BYTES // 32, True),
        (32, grouped.MIN_PRODUCTS >> 10, 32, True),
        (32, 1, grouped.MIN_WEIGHT_BYTES // 32 - 1, False),
        (grouped.MIN_EXPERTS - 1, grouped.MIN_PRODUCTS, 1 << 20, False),
    ],
)
def test_threads_pay_for_enough_work(experts, rows, per_expert, worth, several):
    sizes = [0, *[rows] * experts, 0]
    assert pays(sizes, per_expert, 1) == worth
    torch.set_num_threads(1)
    assert not pays(sizes, per_expert, 1)
