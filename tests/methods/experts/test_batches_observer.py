"""Sums of what experts of stock classes do, over several passes and of pruned models."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from prunecli.errors import PruneError, UnsupportedModelError
from prunecli.methods.experts.batches import StockObserver
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules.stock_experts import expert_modules
from prunecli.results.gates import GateSums
from tests.reference.stock_experts import expert_calls
from tests.stock_mixtures import tiny_mixture

IDS = torch.randint(2, 64, (3, 13), generator=torch.Generator().manual_seed(2))
MASK = torch.tensor([[1] * 13, [1] * 9 + [0] * 4, [1] * 2 + [0] * 11])


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def test_passes_add_up_and_the_largest_norm_stays():
    model = tiny_mixture("qwen3_moe")
    observer = StockObserver(_layers(model))
    parts = [_run(observer, model, IDS[row : row + 1], None)[1] for row in range(3)]
    with observer.watching(model):
        for row in range(3):
            model(IDS[row : row + 1])
    whole = observer.take()[1]
    together = parts[0] + parts[1] + parts[2]
    torch.testing.assert_close(whole, together, rtol=1e-12, atol=0)
    assert whole.norm_max.max() == max(part.norm_max.max() for part in parts)


def test_equal_weights_are_ranked_by_the_number_of_the_expert():
    model = tiny_mixture("mixtral")
    for module in expert_modules(model).values():
        module.register_forward_pre_hook(lambda _module, args: (*args[:2], torch.full_like(args[2], 0.5)))
    observer = StockObserver(_layers(model))
    modules = expert_modules(model)
    calls = expert_calls(model, modules, input_ids=IDS)
    taken = _run(observer, model, IDS, None)
    for index, (_, experts, _) in enumerate(calls.values()):
        lowest = experts.min(dim=1).values
        assert taken[index].top1[0].tolist() == torch.bincount(lowest, minlength=8).tolist()


def test_pruned_experts_have_their_original_numbers():
    model = tiny_mixture("qwen3_moe")
    kept = (0, 2, 3, 5, 6, 8, 9, 11)
    whole, found = (
        _run(StockObserver(layers), model, IDS, MASK)[0].routed
        for layers in (_layers(model), _layers(model, kept, 12))
    )
    assert found.shape == (1, 12)
    assert found[:, kept].tolist() == whole.tolist()
    assert found.sum() == 24 * 2


def test_an_output_that_is_not_finite_is_an_error():
    model = tiny_mixture("qwen3_moe")
    next(iter(expert_modules(model).values())).down_proj[:] = 1e38
    with pytest.raises(PruneError, match=r"model\.layers\.0\.mlp: the output of an expert is not finite"):
        _run(StockObserver(_layers(model)), model, IDS, MASK)


def _layers(model: Any, kept: Sequence[int] = tuple(range(8)), original: int = 8) -> tuple[SparseLayer, ...]:
    experts = {"num_experts": len(kept), "experts": tuple(kept), "original_experts": original}
    more = {"side": "decoder", "expert_tensors": (), "router_tensors": (), **experts}
    return tuple(
        SparseLayer(name.removesuffix(".experts"), layer=number, expert_prefix=f"{name}.{{expert}}", **more)
        for number, name in enumerate(expert_modules(model))
    )


def _run(
    observer: StockObserver, model: Any, ids: torch.Tensor, mask: torch.Tensor | None
) -> dict[int, GateSums]:
    observer.begin(decoder=torch.ones_like(ids) if mask is None else mask)
    with observer.watching(model):
        model(input_ids=ids, attention_mask=mask)
    return observer.take()


def test_layers_that_the_model_does_not_run_are_refused():
    model = tiny_mixture("qwen3_moe")
    observer = StockObserver(_layers(model)[:1])
    with pytest.raises(UnsupportedModelError, match="2 layers of experts"), observer.watching(model):
        pass
