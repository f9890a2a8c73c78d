"""What is said of a checkpoint whose family is not declared."""

from __future__ import annotations

import pytest

from prunecli.model.checkpoint import open_model
from prunecli.model.names import surmise
from prunecli.pipeline import apply
from prunecli.tensors.reader import TensorInfo
from tests.contracts.method_contract import logits
from tests.selections import kept_heads
from tests.tiny import config_of, tiny_nllb_moe, write_json


def tensors(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {name: TensorInfo(name, "F16", shape) for name, shape in names.items()}


def test_stacked_and_numbered_experts():
    stacked = tensors(model__layers__0__mlp__experts__gate_up_proj=(16, 8, 4))
    assert surmise({}, stacked).experts == {"model.layers.*.mlp.experts": 16}
    numbered = {
        f"h__{layer}__experts__{expert}__w1__weight": (8, 4) for layer in (0, 1) for expert in range(3)
    }
    found = surmise({}, tensors(**numbered, embed__wte__weight=(50, 4)))
    assert found.experts == {"h.*.experts": 3}
    assert found.layers == {"h": 2}
    assert found.tables == ("embed.wte",)
    assert set(found.modules) == {"h.*.experts", "embed.wte"}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, ("", "")),
        ({"quantization_config": {"quant_method": "awq"}}, ("awq", "")),
        ({"quantization_config": {}, "text_config": {"model_type": "llama"}}, ("", "llama")),
        ({"quantization": {"bits": 4}}, ("of unknown method", "")),
        ({"quantization_config": 3, "text_config": ["llama"]}, ("", "")),
    ],
)
def test_what_config_json_says(config, found):
    made = surmise(config, {})
    assert (made.quantisation, made.text_type) == found


def test_results_of_older_types_have_the_name_of_today(tmp_path):
    source = tiny_nllb_moe(tmp_path / "source")
    wanted = logits(source)
    config = config_of(source)
    write_json(source / "config.json", {**config, "model_type": "nllb_moe"})
    assert (logits(source) == wanted).all()
    from prunecli.selection.cut import cut

    with open_model(source) as opened:
        rewrite = cut(opened, kept_heads({}))
        apply(opened, rewrite, tmp_path / "out")
    assert config_of(tmp_path / "out")["model_type"] == "nllb-moe"
    assert (logits(tmp_path / "out") == wanted).all()
