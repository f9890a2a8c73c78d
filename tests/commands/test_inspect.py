import re
from typing import Any

import pytest
from transformers import MambaConfig, MambaForCausalLM

from prunecli.commands.inspect import inspect
from prunecli.model.structure import Structure
from tests.commands.calls import both, refusals, refused
from tests.families.cutting import saved
from tests.ffn_layouts import tiny as tiny_layout
from tests.ffn_layouts import write_changed
from tests.results.tables import rows
from tests.structures import axes_of
from tests.tiny import VOCAB, change_config, config_of, fewer_experts, random_tensors, tiny_nllb_moe


@pytest.fixture
def tiny():
    return tiny_nllb_moe("tiny")


run, done = both(inspect)


def as_json(*arguments: Any) -> dict[str, Any]:
    return done(*arguments, "--json").json


def test_the_table_counts_every_part(tiny):
    parts = ("embeddings", "attention", "ffn", "experts", "router", "norm", "total")
    # An expert is 16 x 32 + 32 + 32 x 16 + 16 = 1,072 parameters; 4 layers of 8.
    done(tiny).shows("nllb-moe, float32, model.safetensors", *parts, "model.decoder.layers.3.ffn", "34,304")


def test_a_model_without_ffns_has_hidden_units_of_its_layers():
    config = MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained("mamba")
    told = done("mamba").err
    assert "64 hidden units in each layer (intermediate_size)" in told
    assert "FFN" not in told


def test_json_holds_the_same_numbers(tiny):
    found = as_json(tiny)
    tensors = random_tensors(config_of(tiny)).values()
    assert found["format"] == "prunecli.inspect/1"
    assert found["models"][0]["fingerprint"].startswith("sha256:")
    sizes = (sum(tensor.size for tensor in tensors), sum(tensor.nbytes for tensor in tensors))
    assert list(found["total"].values()) == [len(tensors), *sizes]
    assert found["parts"]["experts"] == {"tensors": 128, "parameters": 34_304, "bytes": 4 * 34_304}
    assert sum(part["bytes"] for part in found["parts"].values()) == found["total"]["bytes"]
    assert found["dtypes"] == {"F32": found["total"]}
    assert [layer["original_experts"] for layer in found["layers"]] == [8] * 4
    size = (tiny / "model.safetensors").stat().st_size
    assert found["files"] == [{"name": "model.safetensors", "bytes": size}]


def test_heads_are_one_line_a_kind_until_some_are_removed(tiny):
    assert re.search(r"cross +4 +2\b", done(tiny).out)
    name = "model.decoder.layers.1.cross_attention"
    structure = Structure(axes_of("head", {name: ()}, 2)).to_json()
    change_config(tiny, prunecli=structure)
    text = done(tiny).out
    assert re.search(rf"{name} +1 +0 of 2\b", text)
    assert re.search(r"encoder +4 +2\b", text)


def test_changed_ffns_are_one_line():
    source = tiny_layout("source", "bart")
    assert "FFN:" not in done(source).out
    encoder, decoder = ([f"model.{side}.layers.{n}" for n in range(2)] for side in ("encoder", "decoder"))
    changes = {encoder[1]: {"shared_with": encoder[0]}, **{name: {"removed": True} for name in decoder}}
    reduced = write_changed(source, "reduced", "bart", changes)
    assert "\nFFN: encoder 1 shares layer 0's; decoder 0-1 removed\n" in done(reduced).out
    found = {ffn["name"]: ffn for ffn in as_json(reduced)["ffns"]}
    assert found[encoder[1]]["shared_with"] == encoder[0]
    assert found[decoder[0]]["removed"] is True


def test_an_ffn_that_cannot_be_is_named(tiny):
    change_config(tiny, prunecli={"version": 1, "ffn": {"model.encoder.layers.9.ffn": {"removed": True}}})
    refused(run(tiny), "config.json names model.encoder.layers.9.ffn, which is no FFN or attention", 1)


def test_a_pruned_model_shows_what_is_left_and_how():
    step = {"command": "prune-experts", "source": {"path": "base", "fingerprint": "sha256:0"}}
    step["arguments"] = {"ratio": 0.5, "metric": "importance", "force": True, "source": None}
    directory = fewer_experts("pruned", [0, 3, 5, 6], step, shards=2)
    text = done(directory).out
    assert text.count("4 of 8") == 4
    assert "2 .safetensors files" in text
    assert "prune-experts --force --metric importance --ratio 0.5  # from base" in text
    assert as_json(directory)["layers"][0]["experts"] == [0, 3, 5, 6]


def test_an_undeclared_family_is_counted_as_other():
    directory = tiny_nllb_moe("tiny", config={"model_type": "bloom"})
    shown = done(directory)
    shown.shows("other", "model.encoder.layers.*.ffn")
    shown.says("Nothing can be removed from it: ", "no NllbMoeForConditionalGeneration can be made of it")
    assert as_json(directory)["modules"]["model.shared"] == ["model.shared.weight"]


def test_a_found_family_is_counted_by_part():
    parameters = dict(saved("granite", "model").named_parameters())
    assert "Found by asking GraniteForCausalLM" in done("model").err
    held = as_json("model")
    named = {"embeddings": "embed|lm_head", "attention": "self_attn", "ffn": "mlp", "norm": "norm"}
    assert {part: amount["parameters"] for part, amount in held["parts"].items()} == {
        part: sum(one.numel() for name, one in parameters.items() if re.search(pattern, name))
        for part, pattern in named.items()
    }
    assert len(held["attentions"]) == len(held["ffns"]) == held["stacks"][0]["original_layers"]


@refusals(
    ("--fit much", "--fit much: not a size"),
    ("--fit 1GiB --dtype float17", "unknown type"),
)
def test_bad_options(refusal, tiny):
    refusal(run, tiny)


def test_the_table_has_the_json_s_values(tiny):
    payload = as_json(tiny, "--table t.csv")
    keys = ("tensors", "parameters", "bytes")
    counts = {row["part"]: {key: row[key] for key in keys} for row in rows("t.csv", "parameters")}
    assert counts == {**payload["parts"], "total": payload["total"]}
    experts = [(row["name"], row["experts"], row["original_experts"]) for row in rows("t.csv", "experts")]
    assert experts == [
        (one["name"], len(one["experts"]), one["original_experts"]) for one in payload["layers"]
    ]
    assert [row["name"] for row in rows("t.csv", "heads")] == [one["name"] for one in payload["attentions"]]
    refused(run(tiny, "--table t.csv"), "exists already", 1)
    shown = done(tiny, "--table t.csv --force --fit 1GiB")
    assert "Written to t.csv." in shown.err
    assert "Parameters" in shown.out
    assert {row["way"] for row in rows("t.csv", "fit")} == {"whole", "layer by layer"}


# `--fit`: each way's bytes against sums made by hand, and what is said of them.


LOAD = "--fit-batch 1 --fit-beam 1 --fit-length 4"


def fit(*arguments: Any) -> dict[str, Any]:
    return as_json(*arguments, LOAD)["fit"]


def test_the_whole_model_in_each_type(tiny):
    whole = fit(tiny, "--fit 1GiB")["whole"]
    assert [(way["dtype"], way["as_stored"]) for way in whole] == [("float32", True), ("float16", False)]
    parameters = sum(array.size for array in random_tensors(config_of(tiny)).values())
    assert [way["weight_bytes"] for way in whole] == [4 * parameters, 2 * parameters]
    for way in whole:
        taken = way["weight_bytes"] + way["decoding_bytes"]
        free = [needed - -(-needed // 10) for needed in (way["needed_bytes"], way["needed_bytes"] - 1)]
        assert free[0] >= taken > free[1]


@pytest.mark.parametrize(
    ("stored", "asked", "found"),
    [
        ("F16", "", [("float16", True), ("float32", False)]),
        ("F32", "--dtype bfloat16", [("bfloat16", False), ("float32", True)]),
    ],
)
def test_types_of_the_same_size_are_one_way(stored, asked, found):
    whole = fit(tiny_nllb_moe("moe", dtype=stored), "--fit 1GiB", asked)["whole"]
    assert [(way["dtype"], way["as_stored"]) for way in whole] == found


def test_what_does_not_fit_is_pruned_in_each_type():
    model = tiny_nllb_moe("model", experts=32)
    half = fit(model, "--fit 1GiB")["whole"][1]["needed_bytes"]
    found = fit(model, "--fit", half - 1)
    assert [way["dtype"] for way in found["pruned"]] == ["float32", "float16"]
    wide, narrow = found["pruned"]
    assert wide["fits"]
    assert narrow["fits"]
    assert wide["ratio"] > narrow["ratio"] > 0
    assert (found["ratio"], found["keep"]) == (wide["ratio"], wide["keep"])
    assert narrow["weight_bytes"] < found["whole"][1]["weight_bytes"]
    done(model, "--fit", half - 1, LOAD).shows(f"--ratio {narrow['ratio']:g} --dtype float16")
    assert done(model, "--fit", half, LOAD).out.endswith("It fits in float16.\n")


def test_nothing_fits_is_an_answer(tiny):
    found = fit(tiny, "--fit 1KiB")
    ways = (*found["whole"], *found["pruned"], *found["by_layer"]["ways"])
    assert not any(way["fits"] for way in ways)
    assert "ratio" not in found
    assert {way["keep"] for way in found["pruned"]} == {8}  # two in each of four layers
    assert "Next:" not in done(tiny, "--fit 1KiB").out


@pytest.mark.parametrize("model_type", ["bart", "bert", "llama"])
def test_every_family_is_reckoned_with(model_type, models):
    directory = models[model_type]
    found = fit(directory, "--fit 2KiB")
    assert not found["whole"][0]["fits"]
    assert found["pruned"] == []
    assert found["whole"][0]["decoding_bytes"] > 0
    over = found["whole"][1]["needed_bytes"] - 2048
    done(directory, "--fit 2KiB", LOAD).shows(
        f"needs {over / 1024:.2f} KiB more, in float16",
        f"prunecli shrink {directory} --fit 2048 --text FILE",
    )
