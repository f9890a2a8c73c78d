"""`prunecli inspect --fit`: each way's bytes against sums made by hand, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli.errors import UsageError
from prunecli.evaluation import capacity
from prunecli.model.checkpoint import open_model
from prunecli.running.layerwise.budget import plan_memory
from tests.commands.test_inspect import as_json, run
from tests.families import tiny_family
from tests.tiny import config_of, random_tensors, tiny_nllb_moe

CPU = torch.device("cpu")

LOAD = ("--fit-batch", 1, "--fit-beam", 1, "--fit-length", 4)


@pytest.fixture
def moe(tmp_path):
    return tiny_nllb_moe(tmp_path / "moe")


def fit(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    return as_json(capsys, *arguments, *LOAD)["fit"]


def parameters(directory: Path) -> int:
    return sum(array.size for array in random_tensors(config_of(directory)).values())


def test_the_whole_model_in_each_type(moe, capsys):
    whole = fit(capsys, moe, "--fit", "1GiB")["whole"]
    assert [(way["dtype"], way["as_stored"]) for way in whole] == [("float32", True), ("float16", False)]
    assert [way["weight_bytes"] for way in whole] == [4 * parameters(moe), 2 * parameters(moe)]
    for way in whole:
        taken = way["weight_bytes"] + way["decoding_bytes"]
        free = [needed - -(-needed // 10) for needed in (way["needed_bytes"], way["needed_bytes"] - 1)]
        assert free[0] >= taken > free[1]


@pytest.mark.parametrize(
    ("stored", "asked", "found"),
    [
        ("F16", [], [("float16", True), ("float32", False)]),
        ("F32", ["--dtype", "bfloat16"], [("bfloat16", False), ("float32", True)]),
    ],
)
def test_types_of_the_same_size_are_one_way(tmp_path, capsys, stored, asked, found):
    directory = tiny_nllb_moe(tmp_path / "moe", dtype=stored)
    whole = fit(capsys, directory, "--fit", "1GiB", *asked)["whole"]
    assert [(way["dtype"], way["as_stored"]) for way in whole] == found


def test_what_does_not_fit_is_pruned_in_each_type(tmp_path, capsys):
    moe = tiny_nllb_moe(tmp_path / "moe", experts=32)
    half = fit(capsys, moe, "--fit", "1GiB")["whole"][1]["needed_bytes"]
    found = fit(capsys, moe, "--fit", half - 1)
    assert [way["dtype"] for way in found["pruned"]] == ["float32", "float16"]
    wide, narrow = found["pruned"]
    assert wide["fits"]
    assert narrow["fits"]
    assert wide["ratio"] > narrow["ratio"] > 0
    assert (found["ratio"], found["keep"]) == (wide["ratio"], wide["keep"])
    assert narrow["weight_bytes"] < found["whole"][1]["weight_bytes"]
    assert run(moe, "--fit", half - 1, *LOAD) == 0
    text = capsys.readouterr().out
    assert f"--ratio {narrow['ratio']:g} --dtype float16" in text
    assert run(moe, "--fit", half, *LOAD) == 0
    assert capsys.readouterr().out.endswith("It fits in float16.\n")


def test_nothing_fits_is_an_answer(moe, capsys):
    found = fit(capsys, moe, "--fit", "1KiB")
    ways = (*found["whole"], *found["pruned"], *found["by_layer"]["ways"])
    assert not any(way["fits"] for way in ways)
    assert "ratio" not in found
    assert {way["keep"] for way in found["pruned"]} == {8}  # two in each of four layers
    assert run(moe, "--fit", "1KiB") == 0
    assert "Next:" not in capsys.readouterr().out


def test_the_smallest_memory_by_layer_is_the_one_that_a_run_takes(moe, monkeypatch):
    demands = []
    monkeypatch.setattr(capacity, "resident_now", lambda: 123_456)
    monkeypatch.setattr(
        capacity,
        "plan_memory",
        lambda memory, demand: (demands.append(demand), plan_memory(memory, demand))[1],
    )
    with open_model(moe) as opened:
        way, _ = capacity.layers_in(opened, 1 << 30, CPU, torch.float32)
        assert capacity.layers_in(opened, way.needed_bytes, CPU, torch.float32)[0].fits
        assert not capacity.layers_in(opened, way.needed_bytes - 1, CPU, torch.float32)[0].fits
    assert demands[0].process == 123_456
    plan_memory(way.needed_bytes, demands[0])
    with pytest.raises(UsageError, match="too little"):
        plan_memory(way.needed_bytes - 1, demands[0])
    states = plan_memory(1 << 30, demands[0]).states
    assert way.state_tokens == states // (16 * 4 + 2 * 16 * 4)  # a hidden state, and two rows for experts


@pytest.mark.parametrize("model_type", ["bart", "bert", "llama"])
def test_every_family_is_reckoned_with(model_type, tmp_path, capsys):
    directory = tiny_family(tmp_path / "model", model_type)
    found = fit(capsys, directory, "--fit", "2KiB")
    assert not found["whole"][0]["fits"]
    assert found["pruned"] == []
    assert found["whole"][0]["decoding_bytes"] > 0
    assert run(directory, "--fit", "2KiB", *LOAD) == 0
    text = capsys.readouterr().out
    over = found["whole"][1]["needed_bytes"] - 2048
    assert f"needs {over / 1024:.2f} KiB more, in float16" in text
    assert f"prunecli shrink {directory} --fit 2048 --text FILE" in text


def test_nothing_is_measured_without_fit(moe, capsys, monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(capacity, "what_fits", refuse)
    assert "fit" not in as_json(capsys, moe)
