"""The closing table of a recipe."""

from __future__ import annotations

import json

import pytest

from prunecli.errors import CheckpointError, StatisticsError
from prunecli.recipes.engine import Report
from prunecli.recipes.run import closing_table
from tests.tiny import tiny_nllb_moe


@pytest.fixture
def checkpoints(tmp_path):
    return {
        "full": tiny_nllb_moe(tmp_path / "a", experts=8),
        "half": tiny_nllb_moe(tmp_path / "b", experts=4),
    }


def write(path, kind, results):
    path.write_text(json.dumps({"format": kind, "results": results}))
    return path


def test_sizes_alone_need_no_measurement(checkpoints):
    columns, rows = closing_table(Report("", checkpoints, None, None))
    assert columns == ["checkpoint", "experts", "parameters", "size"]
    # 4 + 4 layers, every second one sparse: 4 layers of 8 and of 4 experts.
    assert [row[:2] for row in rows] == [["full", "32"], ["half", "16"]]


def test_scores_and_speed_stand_beside_the_sizes(tmp_path, checkpoints):
    scores = {"chrf++": 81.25, "bleu": 70.0, "length_ratio": 1.0, "over_generated": 0.0}
    evaluation = write(
        tmp_path / "evaluation.json",
        "prunecli.evaluation/1",
        [{"checkpoint": "a", "mean": scores}, {"checkpoint": "b", "mean": {**scores, "bleu": 60.04}}],
    )
    latency = write(
        tmp_path / "latency.json",
        "prunecli.latency/1",
        [
            {
                "checkpoint": "b",
                "timings": [
                    {
                        "tokens_per_second": {"mean": 1234.4, "std": 56.0},
                        "speedup": {"mean": 1.5, "std": 0.25},
                    }
                ],
            }
        ],
    )
    columns, rows = closing_table(Report("", checkpoints, evaluation, latency))
    assert columns[4:] == ["chrF++", "BLEU", "tokens/s", "speed-up"]
    assert [row[4:] for row in rows] == [
        ["81.2", "70.0", "-", "-"],
        ["81.2", "60.0", "1,234 ± 56", "1.50 ± 0.25"],
    ]


def test_models_that_do_not_translate_have_the_scores_of_their_task(tmp_path, checkpoints):
    results = [
        {"checkpoint": "a", "scores": {"perplexity": 1234.567, "bits_per_byte": 2.0}},
        {"checkpoint": "b", "scores": {"accuracy": 0.9125, "loss": 0.3}, "mean": {}},
    ]
    evaluation = write(tmp_path / "evaluation.json", "prunecli.evaluation/1", results)
    columns, rows = closing_table(Report("", checkpoints, evaluation, None))
    assert columns[4:] == ["perplexity", "accuracy"]
    assert [row[4:] for row in rows] == [["1,234.57", "-"], ["-", "91.2%"]]


def test_texts_with_names_have_scores_of_their_own(tmp_path, checkpoints):
    full = {"prose": {"perplexity": 20.0, "loss": 3.0}, "code": {"perplexity": 50.0}}
    half = {
        "prose": {"perplexity": 21.5, "kl_divergence": 0.0625, "top1_agreement": 0.875},
        "code": {"perplexity": 60.0, "kl_divergence": 1.5, "top1_agreement": 0.5},
    }
    results = [
        {"checkpoint": name, "scores": {"perplexity": 1.0}, "by_text": by_text}
        for name, by_text in (("a", full), ("b", half))
    ]
    evaluation = write(tmp_path / "evaluation.json", "prunecli.evaluation/1", results)
    columns, rows = closing_table(Report("", checkpoints, evaluation, None))
    assert columns[4:] == [f"{text}\n{score}" for text in full for score in ("perplexity", "KL", "top-1")]
    assert [row[4:] for row in rows] == [
        ["20.00", "-", "-", "50.00", "-", "-"],
        ["21.50", "0.062", "87.5%", "60.00", "1.500", "50.0%"],
    ]


def test_a_file_of_another_kind_is_refused(tmp_path, checkpoints):
    wrong = write(tmp_path / "gates.json", "prunecli.gates/1", [])
    with pytest.raises(StatisticsError, match="has the format"):
        closing_table(Report("", checkpoints, wrong, None))


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError):
        closing_table(Report("", {"x": tmp_path / "empty"}, None, None))
