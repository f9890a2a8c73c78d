"""What a stock class holds goes back to the names and layout of the files that it was read from, to the last bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from prunecli.errors import UnsupportedModelError
from prunecli.model.checkpoint import open_model
from prunecli.model.skeleton import stored_form
from prunecli.modules.stock_names import not_run
from tests.opening import load
from tests.stock_mixtures import tiny_mixture

WEIGHTS = "model.safetensors"


def saved(folder: str, model_type: str, **config: Any) -> Path:
    tiny_mixture(model_type, **config).save_pretrained(folder)
    return Path(folder)


def assert_as_stored(folder: Path, absent: set[str] = frozenset()) -> None:
    """The model that is loaded of a directory goes back to its file, tensor by tensor."""
    model = load(folder)
    files = load_file(folder / WEIGHTS)
    assert {*not_run(model, open_model(folder))} == absent
    found = stored_form(model)
    assert found.keys() >= files.keys() - absent
    for name in files.keys() - absent:
        assert torch.equal(found[name], files[name]), name


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_every_family(model_type):
    assert_as_stored(saved("model", model_type))


def test_layers_for_further_tokens_stay_as_they_are():
    """In types that the model does not run in, too."""
    folder = saved("model", "qwen3_next")
    tensors = load_file(folder / WEIGHTS)
    beyond = {
        "mtp.fc.weight": torch.randn(32, 64).bfloat16(),
        "mtp.layers.0.mlp.gate.weight": torch.randn(8, 32).half(),
        **{
            f"mtp.layers.0.mlp.experts.{number}.{part}_proj.weight": torch.randn(shape)
            for number in range(8)
            for part, shape in (("gate", (24, 32)), ("up", (24, 32)), ("down", (32, 24)))
        },
    }
    save_file({**tensors, **beyond}, folder / WEIGHTS, metadata={"format": "pt"})
    assert_as_stored(folder, {*beyond})


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts of Qwen3.5 in the layout in which some of its models are published: all of a layer in two tensors."""
    blocks = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    made = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for block in blocks:
        gate, up, down = (
            torch.stack([tensors[f"{block}.experts.{number}.{part}_proj.weight"] for number in range(8)])
            for part in ("gate", "up", "down")
        )
        made[f"{block}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        made[f"{block}.experts.down_proj"] = down
    return made


def test_a_family_of_two_layouts_keeps_its_own():
    folder = saved("model", "qwen3_5_moe_text")
    made = stacked(load_file(folder / WEIGHTS))
    assert sum("experts" in name for name in made) == 6
    save_file(made, folder / WEIGHTS, metadata={"format": "pt"})
    assert_as_stored(folder)


def test_a_tied_output_is_not_stored():
    folder = saved("model", "gpt_oss", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    assert_as_stored(folder)


def test_what_would_be_written_otherwise_is_refused():
    model = load(saved("one", "qwen3_moe"))
    narrow = saved("other", "qwen3_moe", moe_intermediate_size=16)
    source = open_model(narrow)
    with pytest.raises(UnsupportedModelError, match="otherwise than it writes"):
        not_run(model, source)
    config = json.loads(Path("one/config.json").read_text())
    tensors = load_file(f"one/{WEIGHTS}")
    save_file(
        {f"model.{name}" if "embed" in name else name: one for name, one in tensors.items()}, narrow / WEIGHTS
    )
    (narrow / "config.json").write_text(json.dumps({**config, "model_type": "flex_olmo"}))
    source = open_model(narrow)
    with pytest.raises(UnsupportedModelError, match=r"model\.embed_tokens\.weight"):
        not_run(model, source)
