import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from prunecli.commands.prune import prune_layers
from prunecli.demo import DATA
from prunecli.methods.options import LayerMetric
from prunecli.model.checkpoint import open_model
from prunecli.model.opening import shim_classes
from tests.commands.calls import both, refusals, refused
from tests.structures import kept_ids
from tests.tiny import write_files

run, done = both(prune_layers)


@pytest.fixture(autouse=True)
def _text():
    names = ("text.txt", "val.eng_Latn", "val.fra_Latn")
    write_files(".", dict.fromkeys(names, "the hen\nten tins on\nthen no hen\n"))


def kept(directory: str | Path = "pruned-layers") -> dict[str, tuple[int, ...]]:
    opened = open_model(directory)
    opened.check()
    return kept_ids(opened.structure, "layer")


def test_named_layers_go(models):
    done(models["m2m_100"], "--remove encoder:1,decoder:0").shows("Written: pruned-layers (stock layout)")
    assert kept() == {"encoder": (0, 2), "decoder": (1,)}
    pruned = open_model("pruned-layers")
    name = "model.{}.layers.{}.fc1.weight"
    np.testing.assert_array_equal(
        pruned.read(name.format("encoder", 1)), open_model(models["m2m_100"]).read(name.format("encoder", 2))
    )
    assert not shim_classes(pruned.config)
    assert (pruned.config["encoder_layers"], pruned.config["decoder_layers"]) == (2, 1)
    assert pruned.structure.history[-1]["arguments"] == {"removed": {"encoder": [1], "decoder": [0]}}
    assert "| `encoder` | 2 | 3 | 33.3% | 0 2 |" in Path("pruned-layers/README.md").read_text()


def test_removed_layers_leave_linear_maps(models):
    text = "--text text.txt --lines --replace linear"
    assert "Loss on " in done(models["gpt2"], "--remove 1", text).out  # the text at hand is measured too
    done(models["gpt2"], "--remove 1 -o plain")
    weight, norm = "transformer.h.0.mlp.c_proj.weight", "transformer.h.1.ln_1.weight"
    mapped = open_model("pruned-layers")
    plain = open_model("plain")
    assert not np.array_equal(mapped.read(weight), plain.read(weight))
    np.testing.assert_array_equal(mapped.read(norm), plain.read(norm))
    arguments = mapped.structure.history[-1]["arguments"]
    assert "replace" not in plain.structure.history[-1]["arguments"]
    assert (arguments["replace"], arguments["text"]["files"]) == ("linear", ["text.txt"])
    refused(run(models["gpt2"], "--remove 1 --replace linear -o other"), "--replace linear needs text")
    streamed = run(models["gpt2"], "--remove 1", text, "--stream -o other")
    refused(streamed, "--replace linear runs the model, which needs all of its weights")


def test_a_saved_selection_names_the_layers_that_stay(models):
    shown = done(models["m2m_100"], "--remove encoder:1,decoder:0 --dry-run --json").out
    Path("choice.json").write_text(shown)
    done(models["m2m_100"], "--keep choice.json")
    assert {f"{side}.layers": list(ids) for side, ids in kept().items()} == json.loads(shown)["kept"]
    refused(run(models["gpt2"], "--keep choice.json -o other"), "a selection for another model", 1)


@pytest.mark.parametrize("metric", get_args(LayerMetric))
def test_json_of_a_dry_run(metric, models):
    text = "--text text.txt" if metric in ("cosine", "cka", "perplexity", "embedding") else ""
    shown = done(models["gpt2"], f"--metric {metric} --count 1", text, "--dry-run --json").json
    assert shown["held"] == {"decoder.layers": 3}
    (place,) = shown["decision"]["places"]
    scores = place.get("values", [2, 1, 0])  # last has none
    least = min(range(3), key=scores.__getitem__)
    kept = shown["kept"]["decoder.layers"]
    assert len(kept) == 2
    assert metric == "random" or kept == [layer for layer in range(3) if layer != least]
    assert shown["stock"]["is_stock"]
    assert shown["arguments"]["metric"] == metric
    assert ("text" in shown["arguments"]) == bool(text)
    assert not Path("pruned-layers").exists()


def test_translation_takes_parallel_text(models):
    text = "--data . --pairs eng_Latn-fra_Latn"
    done(models["m2m_100"], "--encoder 1 --decoder 1", text).says("Layers by cosine (default)")
    assert {side: len(numbers) for side, numbers in kept().items()} == {"encoder": 2, "decoder": 1}


def test_without_an_amount_the_default_is_said(models):
    done(models["m2m_100"], "--metric random").says("No --ratio given: removing 25% of the layers.")
    assert sum(map(len, kept().values())) + ("decoder" not in kept()) * 2 + ("encoder" not in kept()) * 3 == 3


@refusals(
    ("{gpt2} --count 1", "--metric cosine needs text"),
    ("{gpt2} --contiguous --metric cka", "--contiguous does not go with --metric cka"),
    ("{gpt2} --remove 0-2", "decoder.layers: no layer would be left"),
    ("{m2m_100} --text text.txt", "--text goes with models that have one stack"),
    ("{m2m_100} --remove 1", "--remove 1: no layer of this model"),
    (f"{{m2m_100}} --contiguous --count 1 --data {DATA}", "layers of each stack is not given"),
)
def test_refusals(refusal, models):
    refusal(lambda line: run(line.format(**models)))
    assert not Path("pruned-layers").exists()


DRY = "--dry-run --json"


@pytest.mark.parametrize("metric", ["cka", "perplexity"])
def test_scores_that_were_saved_take_the_place_of_text(metric, models):
    options = f"--metric {metric} --text text.txt --save-scores layers.json"
    from_text = done(models["gpt2"], options, "--count 1", DRY).json
    result = done(models["gpt2"], "--scores layers.json --count 1", DRY)
    found = result.json
    assert f"Layers by {metric}, from layers.json: the lowest of all layers are removed." in result.err
    assert found["kept"] == from_text["kept"]
    values = (one["decision"]["places"][0]["values"] for one in (found, from_text))
    np.testing.assert_allclose(*values, rtol=1e-12)
    assert found["arguments"]["metric"] == metric
    assert found["decision"]["origin"]["texts"] == ["text.txt"]
    twice = run(models["gpt2"], "--scores layers.json --scores layers.json --count 1", DRY)
    if metric == "cka":
        refused(twice, "Scores of the method cka are no sums", 1)
    else:
        assert twice.json["kept"] == found["kept"]
