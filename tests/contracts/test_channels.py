"""Channels of the residual stream: what is left computes what the model does over these channels alone."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from prunecli.errors import UnsupportedModelError
from prunecli.model.checkpoint import open_model
from prunecli.model.find_axes import axes_of
from prunecli.selection.cut import Selection, cut
from tests.contracts.method_contract import logits_of, written
from tests.families import cutting, tiny, tiny_family
from tests.tiny import config_of, write_json

STEP = {"command": "test"}


@pytest.fixture(scope="module", params=["llama", "granite"])
def model(request, shared_path):
    folder = shared_path / request.param
    if request.param == "llama":
        return tiny_family(folder, "llama")
    config = tiny.tiny_config("granite")
    config.embedding_multiplier, config.logits_scaling, config.residual_multiplier = 3.0, 2.0, 0.5
    tiny.auto_class("granite")(config).save_pretrained(folder)
    return folder


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_model_is_the_one_over_its_channels(model, data):
    checkpoint = open_model(model)
    (axis,) = axes_of(checkpoint, "channel")
    heads = checkpoint.config["num_attention_heads"]
    count = data.draw(st.integers(1, len(axis.ids) // heads - 1)) * heads
    kept = sorted(data.draw(st.permutations(axis.ids))[:count])
    written(model, Selection({axis.name: kept}, step=STEP), "out", force=True)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)
    assert found.config.hidden_size == count
    assert (found.config.num_attention_heads, found.config.head_dim) == (heads, len(axis.ids) // heads)

    def over_kept(norm, given, _):
        """Norm over the kept channels, the only ones that the parts of the model then read."""
        made = torch.zeros_like(given[0])
        own = given[0][..., kept]
        made[..., kept] = functional.rms_norm(own, (count,), norm.weight[kept], norm.variance_epsilon)
        return made

    for name, norm in whole.named_modules():
        if name.endswith("norm"):
            norm.register_forward_hook(over_kept)
    rows = {"input_ids": torch.tensor([[5, 9, 2, 7, 5]])}
    torch.testing.assert_close(logits_of(found, rows), logits_of(whole, rows), rtol=1e-4, atol=1e-5)


def test_a_result_states_what_would_follow():
    cutting.saved("qwen2", "model")
    checkpoint = open_model("model")
    (axis,) = axes_of(checkpoint, "channel")
    assert "head_dim" not in checkpoint.config
    config = cut(checkpoint, Selection({axis.name: axis.ids[::2]}, step=STEP)).config
    assert (config["hidden_size"], config["head_dim"]) == (len(axis.ids) // 2, len(axis.ids) // 4)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("minicpm3", "something depends on their number"),  # logits over the width
        ("bert", "other sizes go with their number"),  # heads narrow with the model
        ("voxtral", "other sizes go with their number"),  # sounds have a width of their own
    ],
)
def test_widths_that_say_more_are_refused(model_type, reason):
    cutting.saved(model_type, "model")
    with pytest.raises(UnsupportedModelError, match=reason):
        axes_of(open_model("model"), "channel")


def test_tensors_that_the_class_does_not_have_are_refused():
    cutting.saved("granite", "model")
    tensors = load_file("model/model.safetensors")
    save_file({**tensors, "model.further.weight": torch.ones(48)}, "model/model.safetensors")
    with pytest.raises(UnsupportedModelError, match="further"):
        axes_of(open_model("model"), "channel")


@pytest.mark.parametrize("folder", [".", "0_Transformer"])
def test_modules_that_read_as_many_are_refused(folder):
    cutting.saved("granite", f"model/{folder}")
    write_json("model/modules.json", [{"path": "0_Transformer"}, {"path": "1_Pooling"}])
    with pytest.raises(UnsupportedModelError, match="modules of sentence-transformers"):
        axes_of(open_model(f"model/{folder}"), "channel")


def test_kinds_that_are_cut_at_once_are_those_cut_one_by_one():
    """Stacked experts lose experts, hidden units and channels, on three dimensions of a tensor."""
    cutting.saved("gpt_oss", "model")
    kinds = ("unit", "expert", "channel", "layer")
    checkpoint = open_model("model")
    every = [{axis.name: axis.ids[1::2] for axis in axes_of(checkpoint, kind)} for kind in kinds]
    every.append({name: ids for kept in every for name, ids in kept.items()})
    paths = ["model"]
    for number, kept in enumerate(every):
        source = paths[-1 if number < len(kinds) else 0]
        paths.append(str(number))
        written(source, Selection(kept, step=STEP), paths[-1])
    one, other = (load_file(f"{folder}/model.safetensors") for folder in paths[-2:])
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    configs = [config_of(folder) for folder in paths[-2:]]
    for config in configs:
        del config["prunecli"]["history"]
    assert configs[0] == configs[1]
