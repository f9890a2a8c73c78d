"""What the rewriting commands print with --json: written as it was read, and what is refused."""

import pytest

from prunecli.errors import DataError

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
SELECTED = {
    "format": "prunecli.selection/1",
    **HEADER,
    **SIZES,
    "details": {"thresholds": {"encoder": 0.5, "decoder": 1}},
    "held": {"e.1.experts": 4, "d.1.experts": 4},
    "kept": {"e.1.experts": [1, 3], "d.1.experts": [0]},
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
ALL = [SELECTED, FFNS, EMBEDDING, FITTED]


@pytest.mark.parametrize("payload", [*ALL, {**SELECTED, "of_a_later_version": [1]}])
def test_what_is_read_is_written_again(read, payload):
    assert read(payload).to_json() == payload


@pytest.mark.parametrize(
    ("payload", "kind", "message"),
    [
        ({**SELECTED, "kept": [1]}, DataError, "kept: Input should be a valid dictionary"),
        (
            {**SELECTED, "kept": {"e.1.experts": [-1]}},
            DataError,
            "kept.e.1.experts.0: Input should be greater",
        ),
        ({**SELECTED, "bytes_after": -1}, DataError, "bytes_after: Input should be greater"),
        ({**FFNS, "groups": 3}, DataError, "groups: Input should be a valid list"),
        ({**FITTED, "input": {"errors": []}}, DataError, "input.explained_variance: Field required"),
    ],
)
def test_refused(read, payload, kind, message):
    with pytest.raises(kind, match=message):
        read(payload)
