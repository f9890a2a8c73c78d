import numpy as np
import pandas as pd
import pytest

from prunecli.errors import CheckpointError
from prunecli.report.charts import MOST_CELLS, Bar, Point, bars, curves, heat_map
from prunecli.report.pictures import correlation_map, group_correlations, mean_correlation
from prunecli.report.render import save_pictures
from tests.pictures import drawn, pixels


def specification(picture):
    picture.chart.to_dict()  # validates it
    return picture.specification(400)


def test_lines_join_only_the_series_that_are_named():
    points = [Point(0, 1, "a", "s"), Point(1, 2, "b", "s"), Point(1, 3, "c", "t"), Point(2, 3, "d", "t")]
    found = specification(curves("c", points, "x", "y", joined={"s"}, references=[2.0]))
    assert [row["name"] for row in drawn(found, "line")] == ["a", "b"]
    assert [row["name"] for row in drawn(found, "point")] == ["a", "b", "c", "d"]
    assert drawn(found, "rule") == [{"y": 2.0}]


def test_a_heat_map_tells_every_value():
    frame = pd.DataFrame([[0.25, None], [float("nan"), -1.0]], ["3", "4"])
    dropped = pd.DataFrame([[True, False], [False, False]])
    found = specification(heat_map("c", frame, (-1, 1), dropped=dropped))
    assert drawn(found, "rect") == [
        {"row": "3", "column": "0", "value": 0.25, "state": "dropped"},
        {"row": "4", "column": "1", "value": -1.0, "state": "kept"},
    ]


def test_a_large_heat_map_shows_means_of_neighbours():
    grid = pd.DataFrame([[float(row % 2)] * 300 for row in range(300)])
    cells = drawn(specification(heat_map("c", grid, (0, 1))), "rect")
    assert len(cells) == 150 * 75 <= MOST_CELLS or len(cells) == 75 * 150 <= MOST_CELLS
    assert {cell["value"] for cell in cells} == {0.5}


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_file_has_the_marks_of_every_picture(tmp_path, suffix):
    rows = [
        [heat_map("cells", pd.DataFrame([[0.25, 0.5], [None, 1.0]], ["a", "b"], ["c", "d"]), (0, 1))],
        [bars("bars", [Bar("a", 1, "1"), Bar("b", 2, "2")], "x"), bars("more", [Bar("c", 3, "3")], "x")],
    ]
    for name in ("one", "two"):
        save_pictures(rows, tmp_path / f"{name}.{suffix}", "Title")
    made = (tmp_path / f"one.{suffix}").read_bytes()
    if suffix != "svg":  # ids of gradients are counted up in one process
        assert made == (tmp_path / f"two.{suffix}").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2
    if suffix == "png":
        pixels(tmp_path / "one.png")
        return
    text = made.decode()
    assert "Title" in text
    assert text.count('aria-roledescription="rect mark"') == 3
    assert text.count('aria-roledescription="bar"') == 3


# Correlation maps by hand, in slices, and as a picture.


def test_by_hand():
    # Columns (3, 4), (6, 8), (-4, 3), (0, 1): cosines 1, 0, 4/5, 3/5.
    table = np.array([[3, 6, -4, 0], [4, 8, 3, 1]], np.float16)
    expected = [[1, 1, 0, 0.8], [1, 1, 0, 0.8], [0, 0, 1, 0.6], [0.8, 0.8, 0.6, 1]]
    found = correlation_map([table])
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert mean_correlation(found) == pytest.approx(2 * (1 + 0.8 + 0.8 + 0.6) / 12)


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(CheckpointError, match="not finite"):
        correlation_map([np.array([[1.0, np.nan]])])


def test_groups_are_means_of_their_dimensions():
    found = correlation_map([np.random.default_rng(1).standard_normal((20, 6))])
    groups = group_correlations(found, 3)
    for first in range(3):
        for second in range(3):
            block = found[2 * first : 2 * first + 2, 2 * second : 2 * second + 2]
            pairs = block[~np.eye(2, dtype=bool)] if first == second else block.ravel()
            assert groups[first, second] == pytest.approx(sum(pairs) / len(pairs))
