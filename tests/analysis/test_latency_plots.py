"""Speed against batch size: the lines by hand, the file whole and repeatable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prunecli.analysis.latency_plots import Speed, speed_lines, speed_plot
from prunecli.errors import PruneError
from tests.pictures import pixels

SPEEDS = [
    Speed(name, size, beam, 10.0 * size, 1.5)
    for name in ("whole", "less")
    for size in (8, 1, 2)
    for beam in (5, 1)
]


def test_lines_by_beam_and_checkpoint() -> None:
    found = speed_lines(SPEEDS)
    assert list(found) == [1, 5]
    assert list(found[5]) == ["whole", "less"]
    assert [(speed.batch_size, speed.beam) for speed in found[5]["less"]] == [(1, 5), (2, 5), (8, 5)]


@pytest.mark.parametrize("speeds", [SPEEDS, SPEEDS[:1]])
def test_the_file_is_a_png_and_equal_for_equal_values(speeds: list[Speed], tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        speed_plot(speeds, tmp_path / name)
    one, two = ((tmp_path / name).read_bytes() for name in ("one.png", "two.png"))
    assert one == two
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "two.png"]
    speed_plot(SPEEDS[:2], tmp_path / "other.png")
    assert not np.array_equal(pixels(tmp_path / "one.png"), pixels(tmp_path / "other.png"))


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(PruneError, match="nothing to draw"):
        speed_plot([], tmp_path / "speed.png")
    assert not list(tmp_path.iterdir())
