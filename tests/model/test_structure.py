"""What `Structure.from_json` takes for a history, on whose form every reader relies."""

from __future__ import annotations

from typing import Any

import pytest

from prunecli.errors import CheckpointError
from prunecli.model.structure import Structure, statistics_files

FILE = {"file": "gates.json", "sha256": "0" * 64}
STEP = {
    "command": "prune-experts",
    "arguments": {"ratio": 0.5},
    "prunecli": "0.1.0",
    "source": {"path": "full", "fingerprint": "sha256:1"},
    "statistics": FILE,
}


def read(*steps: Any) -> Structure:
    return Structure.from_json({"version": 1, "history": list(steps)})


def test_a_history_comes_back_as_it_was() -> None:
    whole = read(STEP, {}, {**STEP, "statistics": [FILE, FILE], "more": 3})
    assert whole.to_json()["history"] == [STEP, {}, {**STEP, "statistics": [FILE, FILE], "more": 3}]
    assert [len(statistics_files(step)) for step in whole.history] == [1, 0, 2]
    assert whole.fingerprints() == ("sha256:1", "sha256:1")


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
def test_a_step_of_another_form_is_damage(step: Any) -> None:
    with pytest.raises(CheckpointError, match="is damaged"):
        read(STEP, step)
