import json
import re

import pytest

from prunecli.errors import DataError
from prunecli.report.collect import collect
from prunecli.results.evaluation import Evaluation
from prunecli.results.latency import Latency
from tests.report import results
from tests.tiny import change_config, tiny_nllb_moe, write_json


def test_results_and_checkpoints_at_any_depth_by_name(tmp_path):
    tiny_nllb_moe(tmp_path / "b" / "model")
    for place, payload in (("a.json", results.latency()), ("b/c/e.json", results.evaluation())):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        write_json(tmp_path / place, payload)
    found = collect(tmp_path)
    assert [one.name for one in found.checkpoints] == ["b/model"]
    assert [name for name, _ in found.of(Latency)] == ["a.json"]
    assert [name for name, _ in found.of(Evaluation)] == ["b/c/e.json"]
    assert found.unreadable == {}
    assert found.title == tmp_path.name


@pytest.mark.parametrize(
    "place", [".hidden/e.json", "run.training/e.json", "node_modules/e.json", "1/2/3/4/5/e.json", ".e.json"]
)
def test_what_is_stepped_over(tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    write_json(tmp_path / place, results.evaluation())
    with pytest.raises(DataError, match="nothing to report"):
        collect(tmp_path)


def test_files_of_others_are_passed_over(tmp_path):
    write_json(tmp_path / "e.json", results.evaluation())
    write_json(tmp_path / "tokenizer.json", {"model": {}})
    write_json(tmp_path / "evaluation.json", {"of": "another tool"})
    (tmp_path / "notes.json").write_text("{not json")
    write_json(tmp_path / "inspected.json", {"format": "prunecli.inspect/1"})
    (tmp_path / "app").mkdir()
    write_json(tmp_path / "app" / "config.json", {"port": 80})
    found = collect(tmp_path)
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
def test_damaged_results_are_named_with_what_is_wrong(tmp_path, name, text, reason):
    (tmp_path / name).write_text(text)
    found = collect(tmp_path)
    assert not found.documents
    assert list(found.unreadable) == [name]
    assert re.search(reason, found.unreadable[name])
    assert str(tmp_path) not in found.unreadable[name]


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
def test_trees_that_are_none_are_refused(tmp_path, change):
    payload = results.languages()
    payload["clustering"]["encoder"] |= change
    write_json(tmp_path / "l.json", payload)
    assert "joins no tree" in next(iter(collect(tmp_path).unreadable.values()))


def test_matrices_without_their_rows_are_refused(tmp_path):
    write_json(tmp_path / "a.json", {**results.similarity(), "components": {"first": []}})
    write_json(tmp_path / "b.json", {**results.languages(), "pairs": ["a-b"]})
    layers = results.languages()
    layers["experts_per_layer"]["mean"] = []
    write_json(tmp_path / "c.json", layers)
    assert list(collect(tmp_path).unreadable) == ["a.json", "b.json", "c.json"]


def test_a_damaged_checkpoint_is_named(tmp_path):
    path = tiny_nllb_moe(tmp_path / "model") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    broken = tiny_nllb_moe(tmp_path / "reduced")
    (broken / "config.json").write_text('{"prunecli": ')
    (broken / "modeling_prunecli.py").write_text("")
    found = collect(tmp_path)
    assert list(found.unreadable) == ["model", "reduced"]
    assert "model.safetensors" in found.unreadable["model"]
    assert "cut short" in found.unreadable["reduced"]


def test_layers_of_countless_experts_or_heads_are_refused(tmp_path):
    axis = {"model.encoder.layers.0.self_attn.heads": {"kept": [0, 1], "of": 10**9}}
    change_config(tiny_nllb_moe(tmp_path / "model"), prunecli={"version": 4, "axes": axis})
    found = collect(tmp_path)
    assert list(found.unreadable) == ["model"]
    assert "at most 65,536" in found.unreadable["model"]
