import json
import re
from pathlib import Path

import pytest

from prunecli.errors import DataError
from prunecli.report.collect import collect
from prunecli.results.evaluation import Evaluation
from prunecli.results.latency import Latency
from tests.report import results
from tests.tiny import change_config, tiny_nllb_moe, write_json


def test_results_and_checkpoints_at_any_depth_by_name():
    tiny_nllb_moe("b/model")
    for place, payload in (("a.json", results.latency()), ("b/c/e.json", results.evaluation())):
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        write_json(place, payload)
    found = collect(Path())
    assert [one.name for one in found.checkpoints] == ["b/model"]
    assert [name for name, _ in found.of(Latency)] == ["a.json"]
    assert [name for name, _ in found.of(Evaluation)] == ["b/c/e.json"]
    assert found.unreadable == {}
    assert found.title == Path.cwd().name


@pytest.mark.parametrize(
    "place", [".hidden/e.json", "run.training/e.json", "node_modules/e.json", "1/2/3/4/5/e.json", ".e.json"]
)
def test_what_is_stepped_over(place):
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    write_json(place, results.evaluation())
    with pytest.raises(DataError, match="nothing to report"):
        collect(Path())


def test_files_of_others_are_passed_over():
    write_json("e.json", results.evaluation())
    write_json("tokenizer.json", {"model": {}})
    write_json("evaluation.json", {"of": "another tool"})
    Path("notes.json").write_text("{not json")
    write_json("inspected.json", {"format": "prunecli.inspect/1"})
    Path("app").mkdir()
    write_json("app/config.json", {"port": 80})
    found = collect(Path())
    assert [*found.documents] == ["e.json"]
    assert not found.checkpoints
    assert not found.unreadable


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("x.json", json.dumps(results.evaluation())[:300], "cut short"),
        ("m.finetune.json", '{"steps": 1', "cut short"),
        ("x.json", json.dumps({**results.evaluation(), "format": "prunecli.evaluation/2"}), "this prunecli"),
        ("x.json", json.dumps(results.heads()).replace("12.5", "-1"), "negative"),
        ("x.json", '{"format": "prunecli.latency/1", "runs": NaN}', "NaN"),
        ("x.json", '{"format": "prunecli.latency/1", "runs": ' + "[" * 100_000, "too deeply|cut short"),
    ],
)
def test_damaged_results_are_named_with_what_is_wrong(name, text, reason):
    Path(name).write_text(text)
    found = collect(Path.cwd())
    assert not found.documents
    assert list(found.unreadable) == [name]
    assert re.search(reason, found.unreadable[name])
    assert str(Path.cwd()) not in found.unreadable[name]


@pytest.mark.parametrize(
    "change",
    [
        {"matrix": [[0, 2, 0.5, 2], [1, 4, 1.25, 3]]},
        {"matrix": [[0, 2, 0.5, 2], [0, 3, 1.25, 3]]},
        {"matrix": [[0, 2, 0.5, 2]]},
        {"matrix": [[0, 2, -0.5, 2], [1, 3, 1.25, 3]]},
        {"languages": ["only"]},
    ],
)
def test_trees_that_are_none_are_refused(change):
    payload = results.languages()
    payload["clustering"]["encoder"] |= change
    write_json("l.json", payload)
    assert "joins no tree" in next(iter(collect(Path()).unreadable.values()))


def test_matrices_without_their_rows_are_refused():
    write_json("a.json", {**results.similarity(), "components": {"first": []}})
    write_json("b.json", {**results.languages(), "pairs": ["a-b"]})
    layers = results.languages()
    layers["experts_per_layer"]["mean"] = []
    write_json("c.json", layers)
    assert list(collect(Path()).unreadable) == ["a.json", "b.json", "c.json"]


def test_a_damaged_checkpoint_is_named():
    path = tiny_nllb_moe("model") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    broken = tiny_nllb_moe("reduced")
    (broken / "config.json").write_text('{"prunecli": ')
    (broken / "modeling_prunecli.py").write_text("")
    found = collect(Path())
    assert list(found.unreadable) == ["model", "reduced"]
    assert "model.safetensors" in found.unreadable["model"]
    assert "cut short" in found.unreadable["reduced"]


def test_layers_of_countless_experts_or_heads_are_refused():
    axis = {"model.encoder.layers.0.self_attn.heads": {"kept": [0, 1], "of": 10**9}}
    change_config(tiny_nllb_moe("model"), prunecli={"version": 4, "axes": axis})
    found = collect(Path())
    assert list(found.unreadable) == ["model"]
    assert "at most 65,536" in found.unreadable["model"]
