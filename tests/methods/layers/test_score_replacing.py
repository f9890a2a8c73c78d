"""Linear maps in the place of layers: against least squares of numpy on what transformers' own hooks see."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    FalconConfig,
    FalconForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from prunecli.errors import UnsupportedModelError
from prunecli.methods.layers.score import RIDGE, cut_replaced
from prunecli.methods.options import LayerOptions, NarrowOptions
from prunecli.methods.plans import plan_layers, plan_widths
from prunecli.methods.units import TextRun
from prunecli.model.checkpoint import open_model
from prunecli.model.find_axes import axes_of
from prunecli.pipeline import apply
from prunecli.selection.cut import Selection, together
from prunecli.text.choice import TextChoice
from tests.contracts.method_contract import written
from tests.families import tiny_family
from tests.ffn_layouts import weights
from tests.tiny import config_of

LINES = ["a b c d e f", "g h a b", "f e d c b a h g", "b d f h a c e g b"]


def replaced(path: str, output: str, remove: str) -> None:
    text = Path("lines.txt")
    text.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    source = open_model(path)
    selection = plan_layers(source, LayerOptions(remove=remove))
    choice = TextChoice(files=(text,), whole_files=False)
    data = choice.read("mlm" if "bert" in source.model_type else "lm")
    apply(source, cut_replaced(source, selection, data, TextRun(choice)), output)


def seen(path: str, ffn: str) -> tuple[Any, list[Any]]:
    """The FFN's outputs `[tokens, width]`, and the hidden states after each layer."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer, made, states = AutoTokenizer.from_pretrained(path), [], []
    model.get_submodule(ffn).register_forward_hook(
        lambda _module, _inputs, output: made.append(output[0].clone())
    )
    for line in LINES:
        ids = tokenizer(line, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            states.append(model(input_ids=ids, output_hidden_states=True).hidden_states)
    joined = [torch.cat([one[0] for one in every]).double().numpy() for every in zip(*states, strict=True)]
    return torch.cat(made).double().numpy(), joined


def least_squares(made: Any, moved: Any) -> Any:
    """T with the least |M (T - 1) - D|^2 + r |T - 1|^2, by rows added to M and D."""
    width = made.shape[1]
    ridge = np.sqrt(RIDGE * np.square(made).sum() / width)
    rows = np.vstack([made, ridge * np.eye(width)])
    return np.eye(width) + np.linalg.lstsq(rows, np.vstack([moved, np.zeros((width, width))]), rcond=None)[0]


@pytest.mark.parametrize(
    ("case", "ffn", "stored", "scale"),
    [
        ("gpt2", "h.0.mlp", "transformer.h.0.mlp.c_proj", 1),
        ("granite", "layers.0.mlp", "model.layers.0.mlp.down_proj", 0.5),  # its layers scale what an FFN adds
        # Adds the attention's output to the FFN's in place.
        ("falcon", "h.0.mlp", "transformer.h.0.mlp.dense_4h_to_h", 1),
    ],
)
def test_the_map_is_the_least_squares_solution(case, ffn, stored, scale):
    tiny_family("model", case if case == "gpt2" else "llama")
    if case == "falcon":
        sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
        FalconForCausalLM(FalconConfig(**sizes)).save_pretrained("model")
    if case == "granite":
        sizes = AutoConfig.from_pretrained("model").to_dict()
        config = GraniteConfig(**{**sizes, "model_type": case, "residual_multiplier": scale})
        GraniteForCausalLM(config).save_pretrained("model")
    made, states = seen("model", ffn)
    replaced("model", "out", "1")
    wanted = least_squares(made, (states[2] - states[1]) / scale)
    before, after = (weights(name) for name in ("model", "out"))
    weight = before[f"{stored}.weight"]
    product = weight @ wanted if case == "gpt2" else wanted.T @ weight
    assert after[f"{stored}.weight"] == pytest.approx(product, rel=1e-3, abs=1e-5)
    if case == "gpt2":
        bias = before[f"{stored}.bias"] @ wanted
        assert after[f"{stored}.bias"] == pytest.approx(bias, rel=1e-3, abs=1e-5)
    config = config_of("out")
    arguments = config["prunecli"]["history"][0]["arguments"]
    assert (arguments["replace"], arguments["text"]["files"]) == ("linear", ["lines.txt"])
    others = [name for name in after if stored not in name and ".1." not in name]
    assert others
    assert all(np.array_equal(after[name], before[name]) for name in others)


def test_hidden_units_go_with_the_map(monkeypatch):
    """At once, or first the layers and then the units: the same tensors."""
    tiny_family("model", "gpt2")
    replaced("model", "shorter", "1")
    text = "lines.txt"
    narrow = NarrowOptions(ratio=0.5, metric="norms")
    source = open_model("model")
    units = plan_widths(source, narrow)
    layers = plan_layers(source, LayerOptions(remove="1"))
    choice = TextChoice(files=(text,), whole_files=False)
    known = {}
    cut_replaced(source, layers, choice.read("lm"), TextRun(choice), known)
    monkeypatch.setattr("prunecli.methods.layers.score.runner_and_batches", None)  # the map is known
    rewrite = cut_replaced(source, together([units, layers]), choice.read("lm"), TextRun(choice), known)
    apply(source, rewrite, "once")
    source = open_model("shorter")
    axes = {axis.name: units.kept[axis.name.replace("h.1.", "h.2.")] for axis in axes_of(source, "unit")}
    written("shorter", Selection(axes, step={"command": "prune-ffn"}), "twice")
    once, twice = (weights(name) for name in ("once", "twice"))
    torch.testing.assert_close(once, twice, rtol=1e-5, atol=1e-6)


def test_layers_at_the_beginning_have_no_map():
    tiny_family("model", "gpt2")
    replaced("model", "out", "0")
    before, after = (weights(name) for name in ("model", "out"))
    assert np.array_equal(
        after["transformer.h.0.mlp.c_proj.weight"], before["transformer.h.1.mlp.c_proj.weight"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_normalise_their_output_are_refused(dtype, monkeypatch):
    monkeypatch.setattr("prunecli.modules.fitting.fitting_dtype", lambda *_, **__: dtype)
    tiny_family("other", "gpt2")
    replaced("other", "shorter", "1")  # rounding does not look like a norm
    tiny_family("model", "bert")
    with pytest.raises(UnsupportedModelError, match="does not add the output of its FFN"):
        replaced("model", "out", "1")
