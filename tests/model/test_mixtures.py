"""Mixtures of experts, found by the names of their tensors; what no record declares is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeForCausalLM

from prunecli.errors import CheckpointError, PruneError
from prunecli.methods.experts.plan import plan_experts, rewrite_constant
from prunecli.methods.options import ExpertOptions
from prunecli.model.checkpoint import open_model
from prunecli.pipeline import apply
from prunecli.selection.cut import cut
from tests.selections import kept_experts
from tests.stock_mixtures import save_mixture
from tests.tiny import config_of, write_json

Tensors = dict[str, Tensor]
ROUTER = "model.layers.2.mlp.gate.weight"
EXPERT = "model.layers.2.mlp.experts.5"


@pytest.fixture(scope="module")
def saved(shared_path):
    made = {}

    def of(model_type):
        if model_type not in made:
            made[model_type] = save_mixture(shared_path / model_type, model_type)
        return made[model_type]

    return of


def changed(
    source: Path, name: str, tensors: Callable[[Tensors], Any], config: dict[str, Any] | None = None
) -> Path:
    """A copy of the checkpoint with other tensors, and other values in config.json."""
    directory = Path(name)
    directory.mkdir()
    held = load_file(source / "model.safetensors")
    tensors(held)
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
    values = config_of(source) | (config or {})
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def same(_tensors: Tensors) -> None:
    pass


def put(name: str, *shape: int) -> Any:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def without(beginning: str) -> Any:
    return lambda tensors: [tensors.pop(name) for name in [*tensors] if name.startswith(beginning)]


def quantised_router(tensors: Tensors) -> None:
    tensors[ROUTER] = tensors[ROUTER].to(torch.uint8)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (put(ROUTER, 7, 32), {}, r"gate.weight has the shape \[7, 32\], the layer has 8 experts"),
        (without(ROUTER), {}, "layers.2.mlp has experts but no router"),
        (without("model.layers.2.mlp.experts."), {}, "layers.2.mlp has a router .* but no experts"),
        (without(f"{EXPERT}."), {}, r"layers.2.mlp lacks expert 5 \(its last is 7\)"),
        (
            put(f"{EXPERT}.up_proj.weight_scale_inv", 1, 1),
            {},
            "expert 5 of .* has other tensors .*_scale_inv",
        ),
        (put(f"{EXPERT}.up_proj.weight", 20, 32), {}, "up_proj.weight of expert 5 .* has the shape"),
        (put("model.layers.2.mlp.balance", 8), {}, r"balance \[8\] has an entry for each of 8 experts"),
        (
            put("model.tower.layers.0.experts.0.weight", 3),
            {},
            "tower.layers.0.experts.0.weight is of an expert",
        ),
        (quantised_router, {}, "gate.weight is quantised"),
        (same, {"num_experts": 6}, '"num_local_experts" is 8, "num_experts" is 6'),
        (same, {"num_local_experts": 16}, "holds 8 experts, config.json says 16"),
        (same, {"num_local_experts": "8"}, "\"num_local_experts\" is '8', not a count"),
    ],
)
def test_what_cannot_be_is_refused(saved, change, config, message):
    path = changed(saved("qwen3_moe"), "odd", change, config)
    with pytest.raises(CheckpointError, match=message):
        open_model(path).check()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"n_group": 0}, "0 groups of 8 experts"),
        ({"n_group": 3}, "3 groups of 8 experts"),
        ({"topk_group": 5}, "topk_group is 5, there are 4 groups"),
        ({"n_group": 1, "topk_group": 2}, "topk_group is 2, there are 1 groups"),
    ],
)
def test_groups_that_cannot_be(saved, config, message):
    path = changed(saved("deepseek_v2"), "odd", same, config)
    with pytest.raises(CheckpointError, match=message):
        open_model(path).check()


def test_every_alias_of_the_count_is_rewritten(saved):
    both = changed(saved("qwen3_moe"), "both", same, {"num_experts": 8})
    checkpoint = open_model(both)
    kept = {layer.name: tuple(range(5)) for layer in checkpoint.mixtures}
    config = cut(checkpoint, kept_experts(kept)).config
    assert (config["num_experts"], config["num_local_experts"]) == (5, 5)
    assert "auto_map" not in config


def test_a_count_within_another_key(saved):
    text = config_of(saved("qwen3_5_moe_text"))
    outer = {
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    }

    def within(tensors):
        for name in list(tensors):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)

    path = changed(saved("qwen3_5_moe_text"), "images", within, outer)
    checkpoint = open_model(path)
    kept = {layer.name: (1, 2, 7) for layer in checkpoint.mixtures}
    assert len(kept) == 3
    config = cut(checkpoint, kept_experts(kept)).config
    assert config["text_config"]["num_experts"] == 3


def test_settings_of_a_quantisation_follow_the_experts(saved):
    settings = {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head", f"{EXPERT}.up_proj", "model.layers.2.mlp.experts.6.up_proj"],
        "dynamic": {"layers.2.mlp.experts.7.down_proj": {"bits": 8}},
    }
    path = changed(saved("qwen3_moe"), "quantised", same, {"quantization_config": settings})
    checkpoint = open_model(path)
    kept = {layer.name: (0, 1, 2, 3, 4, 6, 7) for layer in checkpoint.mixtures}
    config = cut(checkpoint, kept_experts(kept)).config
    assert config["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head", "model.layers.2.mlp.experts.5.up_proj"],
        "dynamic": {"layers.2.mlp.experts.6.down_proj": {"bits": 8}},
    }
    with pytest.raises(PruneError, match="`dtype=float16`: the weights are quantised"):
        cut(checkpoint, kept_experts(kept, dtype="float16"))
    settings["ignore"] = ["re:.*experts.5.*"]
    odd = changed(saved("qwen3_moe"), "pattern", same, {"quantization_config": settings})
    checkpoint = open_model(odd)
    with pytest.raises(PruneError, match="name experts by number"):
        cut(checkpoint, kept_experts(kept))


def test_constants_leave_the_other_settings_as_asked(saved):
    """This holds where no expert is removed, too; a key that config.json does not state is not set."""
    path = changed(saved("glm4_moe"), "mtp", with_predicting_layer)
    options = ExpertOptions(metric="random", ratio=0.5, mtp="drop", active=1, constant=True)
    config = config_of(path)
    for key in ("num_nextn_predict_layers", "left_out"):
        stated = {
            key if name == "num_nextn_predict_layers" else name: value for name, value in config.items()
        }
        write_json(path / "config.json", stated)
        checkpoint = open_model(path)
        plan = plan_experts(checkpoint, options)
        means = {layer.name: np.zeros((8, 32)) for layer in checkpoint.mixtures if not layer.is_predicting}
        result = rewrite_constant(checkpoint, plan, means).config
        assert result["num_experts_per_tok"] == 1
        assert result.get("num_nextn_predict_layers") == (None if key == "left_out" else 0)
        assert "approximate_experts" in result


def with_predicting_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        tensors[name.replace("layers.2.", "layers.3.")] = tensors[name].clone()
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(32, 64)


def test_layers_that_predict_further_tokens_can_be_dropped(saved):
    config = {"num_nextn_predict_layers": 1}
    path = changed(saved("glm4_moe"), "mtp", with_predicting_layer, config)
    options = ExpertOptions(metric="random", ratio=0.5, mtp="drop", active=1)
    checkpoint = open_model(path)
    rewrite = cut(checkpoint, plan_experts(checkpoint, options))
    assert apply(checkpoint, rewrite, "dropped").stock_support.is_stock
    assert rewrite.config["num_nextn_predict_layers"] == 0
    assert rewrite.config["num_experts_per_tok"] == 1
    assert rewrite.structure.of_kind("expert")["model.layers.3.mlp"].kept == ()
    result = open_model("dropped")
    assert not any(name.startswith("model.layers.3.") for name in result.tensors)
    assert [layer.num_experts for layer in result.mixtures] == [4, 4]
    assert Glm4MoeForCausalLM.from_pretrained("dropped").model.layers[1].mlp.gate.top_k == 1
