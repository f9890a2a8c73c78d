"""What the rewriting commands print with --json: written as it was read, its tables, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prunecli import results
from prunecli.errors import DataError, PruneError, StatisticsError
from prunecli.results.tabled import Tabled
from prunecli.tensors.documents import write_json

HEADER = {
    "prunecli": "0.1.0",
    "command": ["prunecli", "prune"],
    "models": [{"path": "m", "fingerprint": "sha256:00", "model_type": "marian"}],
    "seed": 0,
    "left_out": ["a.onnx"],
    "output": None,
    "stock": {"is_stock": True, "reason": None, "nearest": None},
    "arguments": {"ratio": 0.5},
}
SIZES = {"parameters_before": 10, "parameters_after": 5, "bytes_before": 40, "bytes_after": 20}
EXPERTS = {
    "format": "prunecli.experts/1",
    **HEADER,
    "experts_before": 4,
    "experts_after": 3,
    **SIZES,
    "thresholds": {"encoder": 0.5, "decoder": 1},
    "kept": {"e.1": [3, 1], "d.1": [0]},
}
HEADS = {
    "format": "prunecli.head-selection/1",
    **HEADER,
    "heads_before": 4,
    "heads_after": 2,
    **SIZES,
    "kept": {"e.0": [], "d.0": [2, 0]},
}
LAYERS = {
    "format": "prunecli.layer-plan/1",
    **HEADER,
    "layers_before": 2,
    "layers_after": 1,
    **SIZES,
    "kept": {"encoder": [1]},
    "layers": [
        {"name": "e.0", "side": "encoder", "layer": 0, "original_layer": 0, "score": 0.25, "kept": False},
        {"name": "e.1", "side": "encoder", "layer": 1, "original_layer": 2, "score": None, "kept": True},
    ],
}
GROUP = {
    "owner": "e.0",
    "members": ["e.0", "e.1"],
    "sources": ["e.0", "e.1"],
    "init": "mean",
    "width": 8,
    "scale": 1,
    "parameters": 40,
}
FFNS = {
    "format": "prunecli.ffn-plan/1",
    **HEADER,
    "groups": [GROUP],
    "removed": ["d.0"],
    "sparse": [],
    **SIZES,
}
NARROWED = {**FFNS, "groups": [{**GROUP, "width_before": 16}]}
EMBEDDING = {
    "format": "prunecli.embedding/1",
    **HEADER,
    "embedding": {"input": {"kind": "define", "map_dim": 8}},
    "embedding_parameters_before": 9,
    "embedding_parameters_after": 3,
    **SIZES,
}
FITTED = {
    **EMBEDDING,
    "input": {
        "explained_variance": 0.5,
        "mean_cosine": 0.75,
        "unit_parameters": 3,
        "table_parameters": 9,
        "projective": {"explained_variance": 0.25, "mean_cosine": 0.5},
        "errors": [0.75, 0.5],
    },
    "output_layer": {"explained_variance": 0.25},
}
VOCABULARY = {
    "format": "prunecli.vocabulary/1",
    **HEADER,
    "tokens_before": 4,
    "tokens_after": 3,
    "parts": {"special and added": 1, "in the text": 2},
    "text": {
        "sentences": 2,
        "sha256": "00",
        "share_kept": 1.0,
        "compared_sentences": 2,
        "compared_changed": 0,
        "compared_running_before": 7,
        "compared_running_after": 7,
    },
    "embedding_parameters_before": 4,
    "embedding_parameters_after": 3,
    "embedding_bytes_before": 16,
    "embedding_bytes_after": 12,
    **SIZES,
    "kept": [0, 2, 3],
}
ALL = [EXPERTS, HEADS, LAYERS, FFNS, NARROWED, EMBEDDING, FITTED, VOCABULARY]


@pytest.fixture
def read(tmp_path: Path) -> Callable[[Any], Tabled]:
    def written(payload: Any) -> Tabled:
        write_json(tmp_path / "result.json", payload, force=True)
        return results.read(tmp_path / "result.json")

    return written


@pytest.mark.parametrize("payload", [*ALL, {**EXPERTS, "of_a_later_version": [1]}])
def test_what_is_read_is_written_again(read: Callable[[Any], Tabled], payload: dict[str, Any]) -> None:
    assert json.dumps(read(payload).to_json()) == json.dumps(payload)


@pytest.mark.parametrize("payload", [EXPERTS, HEADS])
def test_a_selection_needs_no_more_than_what_is_kept(
    read: Callable[[Any], Tabled], payload: dict[str, Any]
) -> None:
    by_hand = {key: payload[key] for key in ("format", "kept")}
    assert read(by_hand).to_json() == by_hand


@pytest.mark.parametrize(
    ("payload", "tables"),
    [
        (EXPERTS, {"sizes": 3, "kept": 3, "thresholds": 2}),
        (HEADS, {"sizes": 3, "kept": 2}),
        (LAYERS, {"sizes": 3, "layers": 2}),
        (FFNS, {"sizes": 2, "groups": 1, "layers": 2}),
        (EMBEDDING, {"sizes": 3}),
        (FITTED, {"sizes": 3, "quality": 3}),
        (VOCABULARY, {"sizes": 5, "parts": 2, "text": 1, "kept": 3}),
    ],
)
def test_tables(read: Callable[[Any], Tabled], payload: dict[str, Any], tables: dict[str, int]) -> None:
    result = read(payload)
    assert {name: len(rows) for name, rows in result.tables().items()} == tables
    sizes = result.frame("sizes").set_index("quantity")
    assert sizes.loc["bytes"].tolist() == [40, 20]


def test_cells(read: Callable[[Any], Tabled]) -> None:
    assert read(EXPERTS).frame("kept")["expert"].tolist() == [3, 1, 0]
    assert read(HEADS).frame("kept").values.tolist() == [["d.0", 2], ["d.0", 0]]
    assert read(LAYERS).frame("layers")["score"].isna().tolist() == [False, True]
    assert read(NARROWED).frame("groups")[["members", "width_before", "width"]].values.tolist() == [
        [2, 16, 8]
    ]
    assert read(FITTED).frame("quality")["explained_variance"].tolist() == [0.5, 0.25, 0.25]
    assert read(VOCABULARY).frame("kept")["original_id"].tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("payload", "kind", "message"),
    [
        ({**EXPERTS, "kept": [1]}, StatisticsError, "format is 'prunecli.experts/1', not"),
        ({**EXPERTS, "kept": {"e.1": [True]}}, StatisticsError, "'e.1' is not a list of expert ids"),
        ({**HEADS, "kept": None}, StatisticsError, 'holds no heads under "kept"'),
        ({**HEADS, "kept": {"e.0": ["1"]}}, StatisticsError, "'e.0' is not a list of head ids"),
        ({**HEADS, "bytes_after": -1}, DataError, "bytes_after: Input should be greater"),
        ({**LAYERS, "layers": [{}]}, DataError, "layers.0.name: Field required"),
        ({**FFNS, "groups": 3}, DataError, "groups: Input should be a valid list"),
        ({**FITTED, "input": {"errors": []}}, DataError, "input.explained_variance: Field required"),
        ({**VOCABULARY, "kept": [-1]}, DataError, "kept.0: Input should be greater"),
    ],
)
def test_refused(
    read: Callable[[Any], Tabled], payload: dict[str, Any], kind: type[PruneError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        read(payload)
