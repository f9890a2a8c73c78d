"""`Structure` as JSON, of this version and older ones, and the form of a history, on which every reader relies."""

import json
from dataclasses import replace

import pytest

from prunecli.errors import CheckpointError
from prunecli.model.structure import KeptUnits, Structure

FILE = {"file": "gates.json", "sha256": "0" * 64}
STEP = {
    "command": "prune-experts",
    "arguments": {"ratio": 0.5},
    "prunecli": "0.1.0",
    "source": {"path": "full", "fingerprint": "sha256:1"},
    "statistics": FILE,
}


@pytest.mark.parametrize(
    "step",
    [
        ".",
        7,
        None,
        ["command"],
        {**STEP, "command": 3},
        {**STEP, "arguments": "%s"},
        {**STEP, "arguments": None},
        {**STEP, "source": "full"},
        {**STEP, "source": {"path": 3}},
        {**STEP, "statistics": "gates.json"},
        {**STEP, "statistics": [FILE, "gates.json"]},
    ],
)
def test_a_step_of_another_form_is_damage(step):
    with pytest.raises(CheckpointError, match="is damaged"):
        Structure.from_json({"version": 1, "history": [STEP, step]})


UNITS = KeptUnits((0, 2), 4)
ENCODER = "model.encoder.layers.{}.self_attn"
WHOLE = Structure(
    axes={
        "encoder.layers": KeptUnits((0, 1, 3), 4),
        "model.encoder.layers.1.ffn.experts": UNITS,
        "model.encoder.layers.0.self_attn.heads": UNITS,
    },
    shared={ENCODER.format(1): ENCODER.format(0), "model.decoder.layers.1": "model.decoder.layers.0"},
    removed=frozenset({ENCODER.format(2), "model.decoder.layers.2"}),
    widths={"model.decoder.layers.0": 48},
    constants={"model.encoder.layers.1.ffn": (2,)},
    history=(STEP,),
)
OF_VERSION_1 = {
    "experts": {"model.encoder.layers.1.ffn": [0, 2]},
    "original_experts": {"model.encoder.layers.1.ffn": 4},
    "heads": {"model.encoder.layers.0.self_attn": [0, 2]},
    "original_heads": {"model.encoder.layers.0.self_attn": 4, "model.encoder.layers.1.self_attn": 4},
    "ffn": {
        "model.decoder.layers.1": {"shared_with": "model.decoder.layers.0"},
        "model.decoder.layers.2": {"removed": True},
        "model.decoder.layers.0": {"width": 48},
    },
    "embedding": {},
    "history": [STEP],
}
OF_VERSION_2 = OF_VERSION_1 | {
    "attention": {
        "model.encoder.layers.1.self_attn": {"shared_with": "model.encoder.layers.0.self_attn"},
        "model.encoder.layers.2.self_attn": {"removed": True},
    },
    "layers": {"encoder": [0, 1, 3]},
    "original_layers": {"encoder": 4},
}
OF_VERSION_3 = OF_VERSION_2 | {"constants": {"model.encoder.layers.1.ffn": [2]}}


def test_json_and_back():
    value = json.loads(json.dumps(WHOLE.to_json()))
    assert value["version"] == 4
    assert value["axes"]["encoder.layers"] == {"kept": [0, 1, 3], "of": 4}
    assert Structure.from_json(value) == WHOLE
    assert not WHOLE.is_stock
    assert Structure().to_json() == {"version": 4}


def test_older_versions_say_the_same():
    assert Structure.from_json({"version": 3, **OF_VERSION_3}) == WHOLE
    second = replace(WHOLE, constants={})
    assert Structure.from_json({"version": 2, **OF_VERSION_2}) == second
    without = {name for name in WHOLE.shared if "attn" in name}, {ENCODER.format(2)}
    first = replace(
        second,
        axes={name: units for name, units in WHOLE.axes.items() if name != "encoder.layers"},
        shared={name: owner for name, owner in WHOLE.shared.items() if name not in without[0]},
        removed=WHOLE.removed - without[1],
    )
    assert Structure.from_json({"version": 1, **OF_VERSION_1}) == first
    assert Structure.from_json({"version": 1}).is_stock


@pytest.mark.parametrize(
    "value",
    [
        {"shared": {"a": "b"}, "removed": ["a"]},
        {"shared": {"a": "b"}, "widths": {"a": 3}},
        {"removed": ["a"], "widths": {"a": 3}},
        {"removed": [3]},
        {"removed": 1},
        {"shared": {"a": 3}},
        {"shared": ["a"]},
        {"widths": {"a": 0}},
        {"widths": {"a": 2.5}},
        {"widths": {"a": True}},
        {"axes": {"a.heads": [0]}},
        {"axes": {"a.heads": {"kept": [0]}}},
        {"axes": {"a.heads": {"kept": 0, "of": 1}}},
        {"axes": {"a.halves": {"kept": [0], "of": 1}}},
    ],
    ids=str,
)
def test_a_damaged_structure(value):
    with pytest.raises(CheckpointError, match="is damaged"):
        Structure.from_json({"version": 4, **value})


@pytest.mark.parametrize(
    "change",
    [{"shared_with": "b", "removed": True}, {"width": 0}, {"shared_with": 3}, {"halved": True}, [], None],
    ids=str,
)
def test_a_damaged_structure_of_an_older_version(change):
    for value in ({"ffn": {"a": change}}, {"attention": {"a": change}}, {"heads": {"a": [0]}}):
        with pytest.raises(CheckpointError, match="is damaged"):
            Structure.from_json({"version": 2, **value})
