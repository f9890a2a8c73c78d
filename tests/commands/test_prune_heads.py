from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from prunecli.model.axes import module_of
from prunecli.model.checkpoint import open_model
from prunecli.model.opening import shim_classes
from prunecli.tensors.transaction import write_json
from tests.commands.calls import names, refusals, refused
from tests.commands.heads import done, kept, run, scored
from tests.tiny import json_of

FIRST = "model.encoder.layers.0.self_attn"
"""Of m2m_100, which has 3 encoder and 2 decoder layers of 4 heads: 28 in all."""


@pytest.fixture
def model(models):
    return models["m2m_100"]


@pytest.fixture
def folder(model):
    """A working directory with the heads.json of `model`."""
    write_json("heads.json", scored(open_model(model)))


def test_prunes_the_least_important_heads(model, folder):
    result = done(model, "--ratio 0.5")
    assert "by gradient over 8 examples, normalised per-layer (default), from heads.json" in result.err
    assert "Written: pruned-heads (opens only where prunecli is installed: prunecli.load_model" in result.out
    sums = json_of("heads.json")["values"]
    share = {}
    for name, layer in sums.items():
        share |= {(module_of(name), head): value / np.linalg.norm(layer) for head, value in enumerate(layer)}
    wanted = sorted(share, key=share.__getitem__)[14:]
    found = kept("pruned-heads")
    assert sorted((name, head) for name, ids in found.items() for head in ids) == sorted(wanted)
    pruned = open_model("pruned-heads")
    step = pruned.structure.history[-1]
    assert pruned.structure.fingerprints() == (open_model(model).fingerprint,)
    assert shim_classes(pruned.config)
    method = {"metric": "importance", "method": "gradient", "normalize": "per-layer"}
    assert step["arguments"] == {"ratio": 0.5, "removed": 14, **method}
    assert step["statistics"]["file"] == "heads.json"


@pytest.mark.parametrize("chosen", ["--normalize none", "--metric random"])
def test_json_of_a_dry_run(chosen, model, folder):
    summary = done(model, chosen, "--count 10 --json --dry-run").json
    assert sum(summary["held"].values()) == 28
    assert sum(map(len, summary["kept"].values())) == 18
    # A head of width 8: 3 x (8 x 32 + 8) of the inputs, 32 x 8 of the output.
    assert summary["parameters_before"] - summary["parameters_after"] == 10 * (3 * (8 * 32 + 8) + 32 * 8)
    assert summary["output"] is None
    assert names() == ["heads.json"]


def test_scores_of_an_ablation_are_compared_as_they_are(model, folder):
    checkpoint = open_model(model)
    values = {layer.name: np.full(layer.count, 50.0) for layer in checkpoint.layout.attentions}
    values[FIRST] = np.array([50.0, 51.0, 20.0, 49.9])
    ablation = {"method": "ablation", "metric": "chrf++", "base": 49.5, "values": values}
    write_json("heads.json", scored(checkpoint, **ablation), force=True)
    assert "by ablation over 8 examples, not normalised (default)" in done(model, "--count 1").err
    assert kept("pruned-heads")[FIRST] == (0, 2, 3)  # better without head 1


@refusals(
    ("--metric random --normalize none", "does not go with"),
    ("--count 29", "at most 28 can"),
    ("--ratio 0.9 --min 1", "at most 21 can"),
    ("--attention self", "no such choice"),
    ("--keep heads.json", "statistics go with --gates or --scores", 1),
    ("--uniform", "a config of type m2m_100 cannot say how many heads are left"),
    ("--scores none.json", "prunecli score-heads", 1),
)
def test_bad_usage_ends_in_two_lines(refusal, model, folder):
    refusal(run, model)
    assert names() == ["heads.json"]


def test_attentions_that_the_model_lacks_are_refused(models):
    refused(run(models["bert"], "--metric random --attention cross"), "It has encoder.")


@pytest.mark.parametrize(
    ("ratio", "kept_heads", "more"),
    [(0.1, 2, "6 of 12 heads are removed (50%), 2 were asked for: "), (0.5, 2, "")],
)
def test_uniform_results_are_stock_models(models, ratio, kept_heads, more):
    """A stock Llama of this width keeps 4, 2 or 1 of 4 groups of heads; a tenth alone would leave 3."""
    result = done(models["llama"], "--metric random --ratio", ratio, "--uniform")
    said = f"{more}{kept_heads} heads are kept in every attention; a stock model may keep 1, 2, 4."
    assert said in result.err.splitlines()
    assert "A stock model: plain transformers opens it." in result.out
    assert {len(ids) for ids in kept("pruned-heads").values()} == {kept_heads}
    assert not Path("pruned-heads/modeling_prunecli.py").exists()
    assert LlamaForCausalLM.from_pretrained("pruned-heads").config.num_key_value_heads == kept_heads
    assert open_model("pruned-heads").structure.history[-1]["arguments"]["uniform"] is True
