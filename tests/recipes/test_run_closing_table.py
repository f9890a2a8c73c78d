"""The closing table of a recipe."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from prunecli.model.checkpoint import open_model
from prunecli.recipes.closing import closing_table
from prunecli.recipes.engine import Report
from tests.tiny import tiny_nllb_moe


@pytest.fixture
def checkpoints(tmp_path):
    return {
        "full": tiny_nllb_moe(tmp_path / "a", experts=8),
        "half": tiny_nllb_moe(tmp_path / "b", experts=4),
    }


def write(path, kind, results, **fields):
    path.write_text(json.dumps({"format": kind, "results": results, **fields}))
    return path


def evaluated(tmp_path, task, first, second):
    """evaluation.json of both checkpoints."""
    results = [{"checkpoint": "a", **first}, {"checkpoint": "b", **second}]
    return write(tmp_path / f"{task}.json", "prunecli.evaluation/1", results, task=task)


def timed(**fields):
    spread = {"mean": 1234.4, "std": 56.0}
    ratio = {"median": 1.5, "deviation": 0.25}
    return {
        "batch_size": 1,
        "tokens_per_second": spread,
        "seconds_per_sentence": spread,
        "speedup": ratio,
    } | fields


def latency(tmp_path, *timings):
    """latency.json of the second checkpoint."""
    result = {"checkpoint": "b", "parameters": 1, "checkpoint_bytes": 1, "timings": timings}
    file = tmp_path / "latency.json"
    return write(file, "prunecli.latency/1", [result], sentences=8, runs=5, device="cpu")


def test_sizes_alone_need_no_measurement(checkpoints):
    columns, (full, half) = closing_table(Report("", checkpoints))
    assert columns == ["checkpoint", "experts", "parameters", "size"]
    # 4 + 4 layers, every second one sparse: 4 layers of 8 and of 4 experts.
    assert (full[:2], half[:2]) == (["full", "32"], ["half", "16"])
    counted = [
        sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values())
        for path in checkpoints.values()
    ]
    less = round(100 * counted[1] / counted[0] - 100)
    assert [full[2].split(), half[2].split()] == [
        [f"{counted[0] / 1e6:.2f}M", "-"],
        [f"{counted[1] / 1e6:.2f}M", f"{less}%"],
    ]
    assert len(full[2]) == len(half[2])  # right-aligned, differences stand below one another


@pytest.mark.parametrize(
    ("task", "first", "second", "columns", "cells"),
    [
        (
            "translation",
            {"mean": {"chrf++": 81.25, "bleu": 70.0, "length_ratio": 1.0}},
            {"mean": {"chrf++": 81.25, "bleu": 60.04, "length_ratio": 0.9}},
            ["chrF++", "BLEU"],
            [["81.2     -", "70.0      -"], ["81.2  +0.0", "60.0  -10.0"]],
        ),
        (
            "lm",
            {"scores": {"perplexity": 1000.0, "bits_per_byte": 2.0}},
            {"scores": {"perplexity": 1075.0, "kl_divergence": 0.0625, "top1_agreement": 0.875}},
            ["perplexity", "KL, nats", "same top-1"],
            [["1,000.000      -", "-", "-"], ["1,075.000  +7.5%", "0.0625", "87.5%"]],
        ),
        (
            "mlm",
            {"scores": {"perplexity": 8.0, "loss": 2.0}},
            {"scores": {"perplexity": 4.0, "loss": 1.0}},
            ["exp(loss)"],
            [["8.000     -"], ["4.000  -50%"]],
        ),
        (
            "classification",
            {"scores": {"accuracy": 0.9125, "matthews": 0.5, "loss": 0.3}},
            {"scores": {"accuracy": 0.9, "matthews": 0.55, "loss": 0.3}},
            ["accuracy", "MCC"],
            [["91.2%     -", "0.500       -"], ["90.0%  -1.2", "0.550  +0.050"]],
        ),
        (
            "embedding",
            {"scores": {"spearman": 0.8, "retrieval": 1.0}},
            {"scores": {"cosine": 0.99, "spearman": 0.75, "retrieval": 0.75}},
            ["cosine to first", "Spearman", "retrieved"],
            [["-", "0.8000        -", "100.0%      -"], ["0.9900", "0.7500  -0.0500", "75.0%  -25.0"]],
        ),
    ],
)
def test_each_task_has_its_scores_and_what_they_differ_by(
    tmp_path, checkpoints, task, first, second, columns, cells
):
    report = Report("", checkpoints, (evaluated(tmp_path, task, first, second),))
    shown, rows = closing_table(report)
    assert shown[4:] == columns
    assert [row[4:] for row in rows] == cells


def test_speed_is_that_of_the_first_batch_size_and_of_each_phase(tmp_path, checkpoints):
    slow = {"mean": 1.0, "std": 0.0}
    one = latency(tmp_path, timed(beam=5), timed(batch_size=8, beam=5, tokens_per_second=slow))
    columns, rows = closing_table(Report("", checkpoints, latency=one))
    assert columns[4:] == ["tokens/s", "speed-up"]
    assert [row[4:] for row in rows] == [["-", "-"], ["1,234 ± 56", "1.50 ± 0.25"]]
    phases = latency(tmp_path, timed(phase="prefill"), timed(phase="decode", tokens_per_second=slow))
    columns, rows = closing_table(Report("", checkpoints, latency=phases))
    assert columns[4:] == [
        "prefill\ntokens/s",
        "prefill\nspeed-up",
        "decode\ntokens/s",
        "decode\nspeed-up",
    ]
    assert rows[1][4::2] == ["1,234 ± 56", "1 ± 0"]
    examples = latency(tmp_path, timed(examples_per_second={"mean": 20.0, "std": 1.0}))
    assert closing_table(Report("", checkpoints, latency=examples))[0][4:] == ["examples/s", "speed-up"]


def test_texts_with_names_have_scores_of_their_own(tmp_path, checkpoints):
    full = {"prose": {"perplexity": 20.0, "loss": 3.0}, "code": {"perplexity": 50.0}}
    half = {"prose": {"perplexity": 21.0, "kl_divergence": 0.0625}, "code": {"perplexity": 60.0}}
    file = evaluated(tmp_path, "lm", {"by_text": full}, {"by_text": half, "scores": {"perplexity": 1.0}})
    columns, rows = closing_table(Report("", checkpoints, (file,)))
    assert columns[4:] == ["prose\nperplexity", "prose\nKL, nats", "code\nperplexity"]
    assert [row[4:] for row in rows] == [
        ["20.000      -", "-", "50.000     -"],
        ["21.000  +5.0%", "0.0625", "60.000  +20%"],
    ]


def test_a_result_belongs_to_the_checkpoint_of_its_weights(tmp_path, checkpoints):
    models = [{"fingerprint": open_model(path).fingerprint} for path in checkpoints.values()]
    results = [
        {"checkpoint": name, "scores": {"perplexity": value}} for name, value in (("x", 1.0), ("y", 2.0))
    ]
    file = tmp_path / "evaluation.json"
    write(file, "prunecli.evaluation/1", results[::-1], task="lm", models=models[::-1])
    _, rows = closing_table(Report("", checkpoints, (file,)))
    assert [row[4].split()[0] for row in rows] == ["1.000", "2.000"]
