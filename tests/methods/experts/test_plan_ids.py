"""Experts to keep from files: ids by language or pair, flat lists over all layers, saved selections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prunecli.errors import PruneError, StatisticsError, UsageError
from prunecli.methods.experts.plan import read_experts
from prunecli.model.axes import Axis

NAMES = ("model.encoder.layers.1.ffn", "model.decoder.layers.1.ffn")


def axes_with(encoder: Sequence[int], decoder: Sequence[int]) -> list[Axis]:
    return [
        Axis(f"{name}.experts", "expert", tuple(ids), 4, side)
        for name, side, ids in zip(NAMES, ("encoder", "decoder"), (encoder, decoder), strict=True)
    ]


AXES = axes_with(range(4), range(4))


def save(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "sources", "targets", "encoder", "decoder"),
    [
        ([0, 3, 5, 6], (), (), (0, 3), (1, 2)),
        ({"a": [0, 1, 4, 5], "b": [2, 3, 6, 7]}, ("a",), ("b",), (0, 1), (2, 3)),
        ({"a": [0, 1, 4, 5], "b": [2, 3, 6, 7]}, ("b",), ("a",), (2, 3), (0, 1)),
        ({"a": [0, 1, 4, 5], "b": [1, 2, 5, 6], "c": [0, 1, 6, 7]}, ("a", "b"), ("c",), (0, 1, 2), (2, 3)),
        ({"a-b": [0, 1, 4, 5], "a-c": [0, 2, 5, 7]}, ("a",), ("b",), (0, 1), (0, 1)),
        ({"a-b": [0, 1, 4, 5], "a-c": [0, 2, 5, 7]}, ("a",), ("b", "c"), (0, 1, 2), (0, 1, 3)),
        ({"a-X": [0, 1, 4, 5], "X-b": [2, 3, 6, 7]}, ("a",), ("b",), (0, 1), (2, 3)),
        (
            {"format": "prunecli.experts/1", "kept": {NAMES[0]: [3, 1], NAMES[1]: [0, 2]}},
            (),
            (),
            (1, 3),
            (0, 2),
        ),
        ({"kept": {f"{name}.experts": [3, 1] for name in NAMES}}, (), (), (1, 3), (1, 3)),
        ({"kept": [0, 3, 5, 6], "b": [1, 2, 4, 7]}, ("kept",), ("b",), (0, 3), (0, 3)),  # a language
    ],
)
def test_expert_ids(
    content: Any,
    sources: Sequence[str],
    targets: Sequence[str],
    encoder: Sequence[int],
    decoder: Sequence[int],
    tmp_path: Path,
) -> None:
    kept = read_experts(save(tmp_path / "experts.json", content), AXES, sources, targets)
    assert kept == {AXES[0].name: encoder, AXES[1].name: decoder}


def test_ids_count_the_original_experts_of_a_pruned_model(tmp_path: Path) -> None:
    axes = axes_with((1, 3), (0, 2))
    path = save(tmp_path / "experts.json", [1, 3, 4, 6])
    assert read_experts(path, axes) == {AXES[0].name: (1, 3), AXES[1].name: (0, 2)}
    with pytest.raises(
        StatisticsError, match=r"keeps expert 0 of model.encoder.layers.1.ffn.experts, .* does not hold"
    ):
        read_experts(save(path, [0, 1, 4, 6]), axes)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({NAMES[0]: [0]}, "selection for another model: model.decoder.layers.1.ffn"),
        ({NAMES[0]: [0], NAMES[1]: [0], "model.layers.1.mlp": [0]}, "model.layers.1.mlp is not in both"),
        ({NAMES[0]: [0], NAMES[1]: [0.5]}, "'model.decoder.layers.1.ffn.experts' is not a list of ids"),
        ({NAMES[0]: [0], NAMES[1]: [4]}, "keeps expert 4 of model.decoder.layers.1.ffn"),
    ],
)
def test_a_selection_that_does_not_fit_is_refused(kept: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StatisticsError, match=message):
        read_experts(save(tmp_path / "experts.json", {"kept": kept}), AXES)


LANGUAGES = {"eng_Latn": [0, 1, 4, 5], "fra_Latn": [0, 1, 4, 5]}


@pytest.mark.parametrize(
    ("content", "sources", "targets", "kind", "message"),
    [
        ([0, 8], (), (), StatisticsError, "8 is no expert id; the model's go from 0 to 7"),
        ([0, -1], (), (), StatisticsError, "-1 is no expert id"),
        ([0, True], (), (), StatisticsError, "True is no expert id"),
        ([0, "1"], (), (), StatisticsError, "no expert id"),
        ([], (), (), StatisticsError, "no expert ids"),
        ([0, 1], ("a",), (), UsageError, "takes no `sources`"),
        (LANGUAGES, (), (), UsageError, "name `sources` and `targets`"),
        (LANGUAGES, ("eng_Latn",), (), UsageError, "name `sources` and `targets`"),
        (LANGUAGES, ("eng_Lat",), ("fra_Latn",), StatisticsError, "Did you mean eng_Latn"),
        ({"a": 3, "b": [1]}, ("a",), ("b",), StatisticsError, "not a list"),
        ({"format": "prunecli.gates/1", "entries": {}}, (), (), StatisticsError, "go with `gates`"),
    ],
)
def test_expert_files_that_do_not_fit_are_refused(
    content: Any,
    sources: Sequence[str],
    targets: Sequence[str],
    kind: type[PruneError],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(kind, match=message):
        read_experts(save(tmp_path / "experts.json", content), AXES, sources, targets)
