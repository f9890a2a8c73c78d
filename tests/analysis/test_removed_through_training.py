"""Checkpoints of one training and what was made of them: told from others, and drawn as Figure 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prunecli.analysis.removed import Kept, kept_of_one_training
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.report.pictures import training_curves
from tests.families import tiny_family
from tests.pictures import drawn


def trained(steps: int, **arguments: Any) -> dict[str, Any]:
    return {"command": "finetune", "arguments": {"steps": steps, "seed": 0, **arguments}}


PRUNED = {"command": "prune-heads", "arguments": {"ratio": 0.5}}


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """A checkpoint with this history."""
    count = iter(range(100))

    def make(*history: dict[str, Any]) -> Checkpoint:
        mark = {"version": 1, "history": list(history)}
        return open_model(tiny_family(tmp_path / str(next(count)), "gpt2", prunecli=mark))

    return make


def test_checkpoints_of_one_training_and_what_was_made_of_them(made):
    early, late = trained(10), trained(40, best=30)
    checkpoints = [made(early), made(late), made(late, PRUNED), made(early, PRUNED), made(early, PRUNED)]
    assert kept_of_one_training(checkpoints, [0, 0, 0.5, 0.5, 0.25]) == [
        Kept(10, 0),
        Kept(40, 1),
        Kept(40, 1),
        Kept(10, 0),
        Kept(10, 0),
    ]


@pytest.mark.parametrize(
    "histories",
    [
        [[], [PRUNED]],
        [[trained(10)], [trained(40)]],
        [[trained(10)], [trained(10), PRUNED]],
        [[trained(10)], [trained(40, seed=1)], [trained(10), PRUNED]],
        [[trained(10)], [PRUNED, trained(40)], [trained(10), PRUNED]],
        [[trained(10)], [trained(40)], [trained(40), PRUNED], [trained(40), PRUNED, trained(1)]],
        [[{"command": "finetune"}], [trained(40)], [trained(40), PRUNED]],
    ],
    ids=[
        "no training",
        "nothing reduced",
        "one step",
        "two trainings",
        "other origins",
        "one share twice",
        "no steps",
    ],
)
def test_others_are_none(made, histories):
    checkpoints = [made(*history) for history in histories]
    removed = [0.5 if PRUNED in history[1:] else 0.0 for history in histories]
    assert kept_of_one_training(checkpoints, removed) is None


def test_scores_are_relative_to_the_unpruned_model_of_the_step():
    removed = [0.0, 0.0, 0.5, 0.5]
    kept = [Kept(10, 0), Kept(100, 1), Kept(100, 1), Kept(10, 0)]
    for scores, whole, half in (
        ([20.0, 50.0, 40.0, 5.0], [(10, 1.0), (100, 1.0)], [(10, 0.25), (100, 0.8)]),
        ([0.0, 40.0, 10.0, 0.0], [(100, 1.0)], [(100, 0.25)]),
    ):
        chart = training_curves("c", scores, removed, kept, ("heads", "chrF++")).specification(400)
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in drawn(chart, "line"):
            lines.setdefault(row["series"], []).append((row["x"], row["y"]))
        assert lines == {"0% of heads removed": whole, "50% of heads removed": half}
        x_axis = chart["layer"][0]["encoding"]["x"]
        assert (x_axis["scale"]["type"], x_axis["axis"]["values"]) == ("log", [10, 100])
        assert chart["layer"][0]["encoding"]["y"]["scale"] == {"zero": True}
