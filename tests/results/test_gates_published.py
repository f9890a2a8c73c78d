"""The authors' files: flat lists over all layers, ratios instead of sums, ids by language or pair."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prunecli.errors import StatisticsError
from prunecli.methods.experts.metrics import METRICS, aggregate
from prunecli.results.gates import NLLB_200_LAYERS, read_gates
from tests.reference import released_statistics

NAMES = ("model.encoder.layers.1.ffn", "model.decoder.layers.1.ffn")


def ratios(seed: int, size: int = 8) -> dict[str, list[float]]:
    values = np.random.default_rng(seed).random((5, size))
    return dict(zip(("top1", "top2", "mean", "conf1", "conf2"), values.tolist(), strict=True))


def save(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_published_entry_keeps_its_ratios(tmp_path: Path) -> None:
    entry = ratios(1, 1536)
    read = read_gates(save(tmp_path / "stats.json", {"eng_Latn-fra_Latn": entry}))
    assert (read.layers, read.num_experts, read.mode) == (NLLB_200_LAYERS, 128, "published")
    assert read.layers[0] == "model.encoder.layers.3.ffn"
    assert read.layers[-1] == "model.decoder.layers.23.ffn"
    sums = read.entries["eng_Latn-fra_Latn"]
    top1, conf, mean, top2 = (
        np.array(entry[name]).reshape(12, 128) for name in ("top1", "conf1", "mean", "top2")
    )
    np.testing.assert_allclose(METRICS["importance"].values(sums), top1 * np.exp(conf), rtol=1e-12)
    np.testing.assert_allclose(METRICS["importance-vanilla"].values(sums), top1 * conf, rtol=1e-12)
    np.testing.assert_allclose(METRICS["load-balance"].values(sums), top1 * mean, rtol=1e-12)
    np.testing.assert_allclose(METRICS["top2"].values(sums), top1 + top2, rtol=1e-12)


def test_entries_of_one_side_stand_for_all_pairs_of_a_language(tmp_path: Path) -> None:
    content = {"a-X": ratios(1), "b-X": ratios(2), "X-a": ratios(3), "X-b": ratios(4), "a-b": ratios(5)}
    read = read_gates(save(tmp_path / "stats.json", content), NAMES, 4)
    values = METRICS["top1"].values(aggregate(read, "language", ["a"], ["b"]))
    np.testing.assert_allclose(values, [content["a-X"]["top1"][:4], content["X-b"]["top1"][4:]])
    everything = METRICS["top1"].values(aggregate(read, "global"))
    np.testing.assert_allclose(
        everything[0], np.mean([content[p]["top1"][:4] for p in ("a-X", "b-X")], axis=0)
    )
    np.testing.assert_allclose(
        everything[1], np.mean([content[p]["top1"][4:] for p in ("X-a", "X-b")], axis=0)
    )


@pytest.mark.parametrize("granularity", ["language", "pair", "global"])
def test_importance_of_several_entries_is_that_of_the_released_code(granularity: str, tmp_path: Path) -> None:
    content = {f"{a}-{b}": ratios(seed) for seed, (a, b) in enumerate(permutations("abc", 2))}
    content["b-a"]["top1"][:2] = [0.0, 0.0]  # experts that a pair never ranks first
    content["b-a"]["conf1"][:2] = [0.0, 0.0]
    read = read_gates(save(tmp_path / "stats.json", content), NAMES, 4)
    chosen = {"language": (["a", "b"], ["c"]), "pair": (["a", "b"], ["c"]), "global": ((), ())}[granularity]
    values = METRICS["importance"].values(aggregate(read, granularity, *chosen))
    pairs = {
        "language": (["a-b", "a-c", "b-a", "b-c"], ["a-c", "b-c"]),
        "pair": (["a-c", "b-c"], ["a-c", "b-c"]),
        "global": (list(content), list(content)),
    }[granularity]
    for row, names in enumerate(pairs):
        wanted = released_statistics.importance([content[pair] for pair in names])
        np.testing.assert_allclose(values[row], wanted[4 * row : 4 * row + 4], rtol=1e-12)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a-b": {"top1": [0.1] * 7}}, "holds 7 values; the model has 2 sparse layers x 4 experts = 8"),
        ({"a-b": {"top1": [0.1] * 7 + [-1]}}, "negative"),
        ({"a-b": {"top1": ["x"] * 8}}, "not an array of numbers"),
        ({"a-b": [1, 2]}, "neither"),
        ({"ab": {"top1": [0.1] * 8}}, "neither"),
        ({"a-b": {"rank": [0.1] * 8}}, "neither"),
        ({}, "no language pairs"),
    ],
)
def test_damaged_files_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(StatisticsError, match=message):
        read_gates(save(tmp_path / "stats.json", content), NAMES, 4)
