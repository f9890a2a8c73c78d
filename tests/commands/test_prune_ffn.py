import itertools
import json
from pathlib import Path
from typing import get_args

import pytest

from prunecli.commands.prune import prune_ffn
from prunecli.methods.options import UnitMetric
from prunecli.model.checkpoint import open_model
from tests.commands.calls import both, refusals, refused
from tests.tiny import write_files

run, done = both(prune_ffn)


@pytest.fixture(autouse=True)
def _text():
    names = ("text.txt", "val.eng_Latn", "val.fra_Latn")
    write_files(".", dict.fromkeys(names, "the hen\nten tins on\nthen no hen\n"))


def test_without_options_the_defaults_are_said(models):
    result = done(models["m2m_100"], "--data . --pairs eng_Latn-fra_Latn")
    result.says(
        "No --ratio given: removing 25% of the hidden units.", "Hidden units of each FFN by activation-norm"
    )
    assert "Written: pruned-ffn (stock layout)" in result.out
    opened = open_model("pruned-ffn")
    opened.check()
    assert (opened.config["encoder_ffn_dim"], opened.config["decoder_ffn_dim"]) == (36, 30)
    arguments = opened.structure.history[-1]["arguments"]
    assert (arguments["ratio"], arguments["metric"]) == (0.25, "activation-norm")


@pytest.mark.parametrize(("score", "per_layer"), zip(get_args(UnitMetric), itertools.cycle([True, False])))
def test_json_of_a_dry_run(score, per_layer, models):
    if per_layer and score == "random":
        return
    text = "" if score in ("norms", "random") else "--text text.txt"
    more = "--uneven" if per_layer else ""
    shown = done(models["llama"], f"--metric {score} --ratio 50%", text, more, "--dry-run --json").json
    assert [*shown["held"].values()] == [48] * 3
    assert sum(map(len, shown["kept"].values())) == 72
    assert shown["stock"]["is_stock"] != per_layer
    assert ("text" in shown["arguments"]) == bool(text)
    assert not Path("pruned-ffn").exists()


def test_dense_ffns_between_experts(models):
    refused(run(models["nllb-moe"], "--metric norms"), "4 of the 8 FFNs are mixtures of experts", 1)
    done(models["nllb-moe"], "--metric norms --dense-only --side encoder")
    ffns = open_model("pruned-ffn").layout.ffns
    assert {layer.count for layer in ffns if layer.side == "encoder"} == {24, 32}


@refusals(
    ("--width 64 --metric norms", "an FFN has 48 hidden units"),
    ("", "--metric activation-norm needs text"),
    ("--metric norms --text text.txt", "--metric norms reads no text"),
    ("--data .", "--data goes with models that translate"),
    ("--scores x.json --save-scores y.json", "nothing is measured on text here"),
)
def test_refusals(refusal, models):
    refusal(run, models["llama"])
    assert not Path("pruned-ffn").exists()


def kept_of(output: str) -> dict[str, list[int]]:
    return json.loads(output)["kept"]


DRY = "--dry-run --json"


@pytest.mark.parametrize("metric", ["", "--metric activation"])
def test_scores_that_were_saved_take_the_place_of_text(models, metric):
    from_text = done(models["llama"], metric, "--text text.txt --save-scores units.json --ratio 0.5", DRY)
    result = done(models["llama"], "--scores units.json --ratio 0.5", DRY)
    assert kept_of(result.out) == kept_of(from_text.out)
    result.says("Hidden units of each FFN by activation", "from units.json")
    origin = result.json["decision"]["origin"]
    assert (origin["texts"], origin["files"][0][0]) == (["text.txt"], "units.json")
    assert result.json["decision"]["places"][0]["tokens"] > 0
    uneven = done(models["llama"], "--scores units.json --uneven --ratio 0.9 --min 4", DRY)
    widths = [len(ids) for ids in kept_of(uneven.out).values()]
    assert min(widths) >= 4
    assert sum(widths) <= 14 + 4


def test_saved_scores_of_another_model_width_or_metric_are_refused(models):
    done(models["llama"], "--text text.txt --save-scores units.json --ratio 0.5")
    other = run(models["llama"], "--scores units.json --metric gradient -o no")
    refused(other, "units.json: of the metric activation-norm, not gradient", 1)
    refused(run("pruned-ffn --scores units.json -o no"), "or of another pruning of it", 1)
    refused(run(models["m2m_100"], "--scores units.json -o no"), "of another model", 1)


def test_a_saved_selection_names_the_units_that_stay(models):
    shown = done(models["llama"], "--metric norms --ratio 0.5 --uneven", DRY).out
    Path("choice.json").write_text(shown)
    assert kept_of(done(models["llama"], "--keep choice.json", DRY).out) == kept_of(shown)
    refused(run(models["m2m_100"], "--keep choice.json"), "a selection for another model", 1)


def test_a_number_of_units_goes(models):
    even = done(models["llama"], "--metric norms --count 30", DRY).out
    assert [len(ids) for ids in kept_of(even).values()] == [38] * 3
    uneven = done(models["llama"], "--metric norms --count 31 --uneven", DRY).out
    assert sum(map(len, kept_of(uneven).values())) == 3 * 48 - 31
    refused(run(models["llama"], "--metric norms --count 31"), "cannot all lose as many")
    refused(run(models["llama"], "--metric norms --count 142"), "at most 141 can")
