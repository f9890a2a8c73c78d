"""Hidden units of experts: a result with fewer computes what the original does whose units are zero."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.analysis.explanation import explain
from prunecli.commands.prune import prune_ffn
from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.methods.measuring import ExpertUnitObserver
from prunecli.methods.options import NarrowOptions
from prunecli.methods.plans import plan_widths
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.find_axes import axes_of
from prunecli.selection.cut import Selection, cut
from tests.commands.calls import done
from tests.contracts.test_mixtures import stock_class
from tests.opening import load
from tests.reference.expert_units import squared_activations
from tests.stock_mixtures import save_mixture
from tests.tiny import config_of

CONFIGS = {
    "deepseek_v3": {"n_shared_experts": 2},
    "gpt_oss": {"intermediate_size": 32},  # the reference takes no more hidden units than channels
    "qwen2_moe": {"shared_expert_intermediate_size": 40},
}


def expert_axes(checkpoint: Checkpoint) -> list[Axis]:
    return [axis for axis in axes_of(checkpoint, "unit") if axis.keys]


def observed(checkpoint: Checkpoint, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Fields of the scores for one pass of the model."""
    observer = ExpertUnitObserver(checkpoint, expert_axes(checkpoint))
    observer.mask = observer._decoder_mask = mask.bool()
    with torch.no_grad(), observer.watching(model):
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    return observer.take()


def test_norms_are_those_of_each_expert():
    source = save_mixture("source", "qwen3_moe")
    checkpoint = open_model(source)
    plan = plan_widths(checkpoint, NarrowOptions(metric="norms", experts=True, width=8))
    axes = expert_axes(checkpoint)
    state = stock_class("qwen3_moe").from_pretrained(source).state_dict()
    for axis in axes:
        block, _, expert = axis.module.rpartition(".")
        gate, up = state[f"{block}.gate_up_proj"][int(expert)].double().chunk(2)
        down = state[f"{block}.down_proj"][int(expert)].double()
        norms = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        assert set(plan.kept[axis.name]) == set(norms.topk(8).indices.tolist())


@pytest.mark.parametrize("model_type", CONFIGS)
def test_activations_are_weighted_by_the_router(model_type):
    """The mean of (g a)^2 over the tokens of each expert, padding left out."""
    source = save_mixture("source", model_type, **CONFIGS[model_type])
    ids = torch.tensor([[5, 9, 12, 6, 8, 11], [7, 13, 4, 0, 0, 0]])
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    model = load(source)
    found = observed(open_model(source), model, ids, mask)
    expected, tokens = squared_activations(model, ids, mask)
    assert expected.keys() <= found["values"].keys()
    for name, own in expected.items():
        np.testing.assert_allclose(found["values"][name], own, rtol=1e-4, atol=1e-10)
        assert found["counts"][name] == max(tokens[name], 1)


def test_shared_experts_side_by_side_have_each_unit_once():
    source = save_mixture("source", "deepseek_v3", **CONFIGS["deepseek_v3"])
    model, ids, seen = load(source), torch.tensor([[5, 9, 12]]), {}
    checkpoint = open_model(source)
    for axis in expert_axes(checkpoint):
        if axis.module.endswith("shared_experts"):
            layer = model.get_submodule(f"{axis.module}.down_proj")
            layer.register_forward_pre_hook(lambda _, given, name=axis.name: seen.update({name: given[0]}))
    found = observed(checkpoint, model, ids, torch.ones_like(ids))
    assert seen
    for name, active in seen.items():
        first, second = active.double().square().sum(dim=(0, 1)).chunk(2)
        np.testing.assert_allclose(found["values"][name], first + second, rtol=1e-4)


def test_one_number_for_all():
    checkpoint = open_model(save_mixture("source", "qwen3_moe"))
    axis = expert_axes(checkpoint)[0]
    with pytest.raises(UsageError, match=r"config\.json has one number for both"):
        cut(checkpoint, Selection({axis.name: (0, 1)}))
    with pytest.raises(UsageError, match="`experts` does not go with"):
        plan_widths(checkpoint, NarrowOptions(experts=True, uniform=False))


def test_a_dense_model_has_none(models):
    with pytest.raises(UnsupportedModelError, match=r"no key of config\.json counts hidden units of experts"):
        plan_widths(open_model(models["llama"]), NarrowOptions(experts=True, metric="norms"))


def test_the_command():
    source = save_mixture("source", "qwen3_moe")
    Path("text.txt").write_text("a b c d e f g h\n" * 40)
    found = done(prune_ffn, source, "--experts --text text.txt --ratio 0.5 -o out")
    assert "model.layers.0.mlp.experts" in found.out
    assert ".experts.0 " not in found.out
    assert config_of("out")["moe_intermediate_size"] == 8
    said = [answer.text for answer in explain("out", "unit 5 of expert 3 of layer 2")]
    assert said[0].startswith("Unit 5 of expert 3 of decoder layer 2 was ")


def test_widths_are_those_that_transformers_runs():
    """8 or 16 of 24 units can stay, unless asked otherwise."""
    options = NarrowOptions(experts=True, metric="norms", width=12)
    checkpoint = open_model(save_mixture("source", "qwen3_moe"))
    with pytest.raises(UsageError, match="`width=12` is no multiple of 8"):
        plan_widths(checkpoint, options)
    kept = plan_widths(checkpoint, options.model_copy(update={"multiple_of": 1})).kept
    assert {len(units) for units in kept.values()} == {12}
