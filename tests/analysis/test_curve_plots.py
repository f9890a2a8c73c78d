from __future__ import annotations

import numpy as np
import pytest

from prunecli.analysis.curve_plots import CurvePoint, curves, score_curve
from prunecli.errors import PruneError

POINTS = [
    CurvePoint(0.0, {"chrF++": 60.0, "BLEU": 40.0}, ("encoder", "cross"), is_original=True),
    CurvePoint(0.5, {"chrF++": 40.0, "BLEU": 20.0}, ("encoder",)),
    CurvePoint(0.2, {"chrF++": 55.0, "BLEU": 35.0}, ("encoder",)),
    CurvePoint(0.3, {"chrF++": 30.0, "BLEU": 10.0}, ("cross",)),
]


def test_every_line_starts_from_the_unreduced_model():
    found = curves(POINTS)
    assert {name: [point.removed for point in members] for name, members in found.items()} == {
        "encoder": [0.0, 0.2, 0.5],
        "cross": [0.0, 0.3],
    }
    assert curves([CurvePoint(0.0, {})]) == {"": [CurvePoint(0.0, {})]}


def test_the_picture(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    score_curve(POINTS, tmp_path / "a.png")
    score_curve(POINTS, tmp_path / "b.png")
    score_curve([CurvePoint(0.1, {"accuracy": 0.9})], tmp_path / "one.png", unit="experts")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    drawn, single = image.imread(tmp_path / "a.png"), image.imread(tmp_path / "one.png")
    assert drawn.shape[1] == pytest.approx(2 * single.shape[1], abs=2), "a panel for each score"
    assert len(np.unique(drawn[..., :3].reshape(-1, 3), axis=0)) > 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png", "one.png"]


def test_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(PruneError, match="nothing to draw"):
        score_curve([], tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
