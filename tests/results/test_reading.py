import json
from pathlib import Path
from typing import Any

import pytest

from prunecli import results
from prunecli.analysis.language_comparison import compare_by_text
from prunecli.errors import DataError, StatisticsError
from prunecli.methods.options import LanguageOptions
from prunecli.model.axes import module_of
from prunecli.model.checkpoint import open_model
from tests.commands.gates import EXPERTS, LAYERS, statistics, text_statistics
from tests.commands.heads import scored
from tests.families import tiny_family
from tests.report import results as files
from tests.tiny import write_json

LATENCY, FINETUNE = files.latency((1, 8)), files.finetune()
EFFECTS = {"base": 30.0, "only": {"a": [29.5, 31.0]}, "p_value": {"a": [0.5, 0.03]}}
WHAT = {"task": "mlm", "examples": 4, "metric": "chrf++", "heads": {"a": [0, 3]}}
ALL_BUT_ONE = {
    "format": "prunecli.heads/1",
    "method": "all-but-one",
    "model": {"fingerprint": "sha256:00", "model_type": "bert"},
    **WHAT,
    **EFFECTS,
    "also": {"bleu": {"base": 20.0, "only": {"a": [19.0, 21.0]}, "p_value": {"a": [0.5, 0.5]}}},
    "best": {"a": 3},
}


def read(payload: Any) -> Any:
    """The result that is stored so."""
    return results.read(write_json("result.json", payload))


def test_speeds_of_0_2_0_had_mean_and_std_or_median_and_deviation():
    figures = {"tokens_per_second": {"mean": 9.0, "std": 0.5}, "speedup": {"median": 2.0, "deviation": 0.25}}
    payload = files.latency()
    payload["results"][0]["timings"][0] |= figures
    speed = read(payload).tables()["speed"][0]
    assert (speed["tokens_per_second_median"], speed["tokens_per_second_deviation"]) == (9.0, 0.5)
    assert (speed["speedup_median"], speed["speedup_deviation"]) == (2.0, 0.25)
    assert "speedup_mean" not in speed


def test_head_importance_is_the_mean_of_the_sums():
    tiny_family("m", "marian")
    payload = scored(open_model("m"))
    found = read(payload).frame("heads")
    name = next(iter(payload["ids"]))
    own = found[found.attention == module_of(name)]
    assert own["head"].tolist() == list(payload["ids"][name])
    assert own["importance"].tolist() == [total / 8 for total in payload["values"][name]]
    tokens = dict.fromkeys(payload["ids"], 5)
    per_token = read({**payload, "per": "token", "counts": tokens}).frame("heads")
    assert (per_token["importance"] == per_token["sum"] / 5).all()


@pytest.mark.parametrize(
    ("reported", "best"),
    [
        (None, [3, 31.0, 1.0, 0.03]),
        (
            {"metric": "chrf++", "examples": 4, "base": 10.0, "only": {"a": 12.5}, "p_value": {"a": 0.25}},
            [3, 12.5, 2.5, 0.25],
        ),
    ],
)
def test_the_best_head_on_its_own_text_or_on_another(reported, best):
    result = read({**ALL_BUT_ONE, **({} if reported is None else {"reported": reported})})
    assert result.frame("best")[["head", "only", "change", "p_value"]].values.tolist() == [best]
    heads = result.frame("heads")
    assert heads["metric"].tolist() == ["chrf++", "chrf++", "bleu", "bleu"]
    assert heads["change"].tolist() == [-0.5, 1.0, -1.0, 1.0]


GATES = statistics(("qba", "qbo")).to_json()


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({"bootstrap": {"chrf++": {"p_value": 0.5, "mean": 1.0}}}, r".*\.ci95: Field required"),
        ({"difference": {"chrf++": {"mean": "much"}}}, r".*\.mean: Input should be a valid number"),
        ({"significant": {"chrf++": 3}}, r"significant\.chrf\+\+: Input should be a valid dictionary"),
        ({"f1_by_class": [1]}, "f1_by_class: Input should be a valid dictionary"),
    ],
)
@pytest.mark.parametrize("at", ["mean", "scores"])
def test_what_is_said_of_scores_has_its_form(scores, message, at):
    payload = {"format": "prunecli.evaluation/1", "task": "lm", "results": [{"checkpoint": "a", at: scores}]}
    with pytest.raises(DataError, match=rf"results\.0\.{at}: {message}"):
        read(payload)


def test_a_table_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(DataError, match="no table 'sizes'") as error:
        read(LATENCY).frame("sizes")
    assert error.value.remedy == "It has speed, size."


@pytest.mark.parametrize(
    ("text", "message"), [("", "an empty file"), ('{"format": ', "cut short"), (None, "no such file")]
)
def test_what_is_no_json(text, message):
    path = Path("result.json")
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        results.read(path)


def test_a_training_s_log():
    training, validation = (read(FINETUNE).frame(name) for name in ("training", "validation"))
    assert training["loss"].tolist() == [4.0, 3.0, 2.0]
    assert validation["chrf++"].tolist() == [52.0, 53.0]


def test_what_shrink_tried_need_not_name_its_metrics():
    tried = {
        "shares": {"heads": 0.5},
        "stage": "curve",
        "parameters": 2,
        "bytes": 4,
        "quality": {"cost": 1.0},
    }
    payload = {"format": "prunecli.shrinking/1", "target": "--params 0.5", "shares": {}, "tried": [tried]}
    assert read(payload).tables()["tried"][0]["heads"] == 0.5


def test_gates():
    held = statistics()
    found = read(held.to_json()).frame("gates")
    assert len(found) == len(held.entries) * len(LAYERS) * EXPERTS
    one = found[(found.pair == "qka-qbo") & (found.layer == LAYERS[1])]
    assert one["top1"].tolist() == held.entries["qka-qbo"].top1[1].tolist()
    assert one["conf2_sum"].tolist() == held.entries["qka-qbo"].conf2_sum[1].tolist()
    assert set(one["tokens"]) == {held.entries["qka-qbo"].tokens[1]}


def test_texts():
    texts = compare_by_text(text_statistics(), LanguageOptions(), ())
    result = read(texts.to_json())
    assert result == texts
    assert result.frame("similarity")["jaccard"].round(6).tolist() == [0.333333, 0, 0]
    assert result.frame("layers")["own_code"].tolist() == [2, 2]
    assert set(result.frame("clusters").iloc[0][["first", "second"]]) == {"code", "shell"}
    for damage in ({"similarity": [[1]]}, {"clustering": {"texts": ["a", "b"], "matrix": [[0, 0, 1, 2]]}}):
        with pytest.raises(DataError):
            read({**texts.to_json(), **damage})


def test_latency():
    result = read(LATENCY)
    speed, size = result.frame("speed"), result.frame("size")
    assert list(zip(speed["batch_size"], speed["checkpoint"], strict=True)) == [
        (1, "big"), (1, "small"), (8, "big"), (8, "small"),
    ]  # fmt: skip
    assert speed["tokens_per_second_median"].tolist() == [100, 150, 800, 1200]
    assert set(speed["speedup_deviation"]) == {0.02}
    assert size["load_seconds"][0] == 2.5
    assert size["device_peak_bytes"].isna().tolist() == [True, True]
    assert set(result.frame()["table"]) == {"speed", "size"}


# What the rewriting commands print with --json: written as it was read, and what is refused.


MADE = {
    "prunecli": "0.1.0",
    "command": ["prunecli", "prune"],
    "seed": 0,
    "left_out": ["a.onnx"],
    "output": None,
}
HEADER = {
    **MADE,
    "models": [{"path": "m", "fingerprint": "sha256:00", "model_type": "marian"}],
    "stock": {"is_stock": True, "reason": None, "nearest": None},
    "arguments": {"ratio": 0.5},
}
SIZES = {"parameters_before": 10, "parameters_after": 5, "bytes_before": 40, "bytes_after": 20}
SELECTED = {
    "format": "prunecli.selection/1",
    **HEADER,
    **SIZES,
    "details": {"thresholds": {"encoder": 0.5, "decoder": 1}},
    "held": {"e.1.experts": 4, "d.1.experts": 4},
    "kept": {"e.1.experts": [1, 3], "d.1.experts": [0]},
}
SHARED = {"owner": "e.0", "members": ["e.0", "e.1"], "sources": ["e.0", "e.1"]}
GROUPS = [{**SHARED, "init": "mean", "width": 8, "scale": 1, "parameters": 40}]
FFNS = {
    "format": "prunecli.ffn-plan/1",
    **HEADER,
    **SIZES,
    "groups": GROUPS,
    "removed": ["d.0"],
    "sparse": [],
}
EMBEDDING = {
    "format": "prunecli.embedding/1",
    **HEADER,
    "embedding": {"input": {"kind": "define", "map_dim": 8}},
    "embedding_parameters_before": 9,
    "embedding_parameters_after": 3,
    **SIZES,
}
QUALITY = {"explained_variance": 0.5, "mean_cosine": 0.75, "unit_parameters": 3, "table_parameters": 9}
FITTED = {
    **EMBEDDING,
    "input": {
        **QUALITY,
        "projective": {"explained_variance": 0.25, "mean_cosine": 0.5},
        "errors": [0.75, 0.5],
    },
    "output_layer": {"explained_variance": 0.25},
}
WRITTEN = "evaluation latency languages similarity finetune head_comparison"
ALL = [*(getattr(files, name)() for name in WRITTEN.split()), SELECTED, FFNS, EMBEDDING, FITTED]


@pytest.mark.parametrize("payload", ALL)
def test_what_is_read_is_written_again(payload):
    payload = {**payload, "of_a_later_version": [1]}
    assert json.loads(json.dumps(read(payload).to_json())) == payload


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([1], "no result of prunecli's"),
        ({"format": 3}, "no result of prunecli's"),
        ({"format": "prunecli.latency/2"}, 'this prunecli reads "prunecli.latency/1"'),
        ({"format": "prunecli.error/1"}, "hold no tables"),
        ({**LATENCY, "results": []}, "results: List should have at least 1 item"),
        ({**LATENCY, "runs": -1}, "runs: Input should be greater"),
        ({**GATES, "entries": {}}, "entries: Dictionary should have at least 1 item"),
        ({**ALL_BUT_ONE, "method": "guess"}, "method is 'guess'"),
        ({**SELECTED, "kept": [1]}, "kept: Input should be a valid dictionary"),
        ({**SELECTED, "kept": {"e.1.experts": [-1]}}, "experts.0: Input should be greater"),
        ({**SELECTED, "bytes_after": -1}, "bytes_after: Input should be greater"),
        ({**FFNS, "groups": 3}, "groups: Input should be a valid list"),
        ({**FITTED, "input": {"errors": []}}, "input.explained_variance: Field required"),
    ],
)
def test_refused(payload, message):
    with pytest.raises((DataError, StatisticsError), match=message):
        read(payload)
