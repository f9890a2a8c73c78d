"""The heat maps: their panels by hand, their file whole and repeatable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prunecli.analysis.components import Component, Kind
from prunecli.analysis.model_similarity import Comparison
from prunecli.analysis.similarity_plots import similarity_map, similarity_panels
from prunecli.architectures.records import Side
from prunecli.errors import PruneError
from tests.pictures import pixels


def part(side: Side, layer: int, kind: Kind) -> Component:
    return Component(f"{side}.{layer}.{kind}", side, layer, kind, f"{side}.{layer}", f"{side}.{layer}.{kind}")


FIRST = (part("encoder", 0, "self"), part("encoder", 0, "ffn"), part("decoder", 0, "cross"))
SECOND = (part("encoder", 0, "self"), part("decoder", 0, "cross"), part("decoder", 0, "ffn"))


def comparison(first: tuple[Component, ...], second: tuple[Component, ...] = ()) -> Comparison:
    count = len(first) + len(second)
    matrix = np.arange(count * count, dtype=np.float64).reshape(count, count) / max(1, count * count)
    return Comparison(first, second, ((), ()), (4, 4), {"cka": matrix})


def test_panels_of_two_models() -> None:
    found = similarity_panels(comparison(FIRST, SECOND), ["A", "B"])
    assert [[(panel.title, panel.names) for panel in row] for row in found] == [
        [("CKA, encoder", ("A", "A")), ("CKA, encoder", ("B", "B")), ("CKA, encoder", ("A", "B"))],
        [("CKA, decoder", ("A", "A")), ("CKA, decoder", ("B", "B")), ("CKA, decoder", ("A", "B"))],
    ]
    between = found[0][2]
    assert (between.rows, between.columns) == (("0.sa", "0.ffn"), ("0.sa",))
    np.testing.assert_array_equal(between.values * 36, [[3], [9]])
    np.testing.assert_array_equal(found[1][2].values * 36, [[16, 17]])
    np.testing.assert_array_equal(found[1][1].values * 36, [[28, 29], [34, 35]])


def test_one_model_has_its_sides_beside_each_other() -> None:
    (row,) = similarity_panels(comparison(FIRST), ["A"])
    assert [panel.title for panel in row] == ["CKA, encoder", "CKA, decoder"]
    assert all(panel.names == ("A", "A") for panel in row)


@pytest.mark.parametrize("second", [(), SECOND])
def test_the_file_is_a_png_and_equal_for_equal_values(second: tuple[Component, ...], tmp_path: Path) -> None:
    made = comparison(FIRST, second)
    made.similarities["cka"][0] = np.nan
    for name in ("one.png", "two.png"):
        similarity_map(made, ["A", "B"], tmp_path / name)
    one, two = ((tmp_path / name).read_bytes() for name in ("one.png", "two.png"))
    assert one == two
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "two.png"]
    made.similarities["cka"][:] = np.nan
    similarity_map(made, ["A", "B"], tmp_path / "other.png")
    assert not np.array_equal(pixels(tmp_path / "one.png"), pixels(tmp_path / "other.png"))


def test_many_components_are_drawn_too(tmp_path: Path) -> None:
    parts = tuple(part("decoder", layer, "self") for layer in range(90))
    similarity_map(comparison(parts), ["A"], tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(PruneError, match="nothing to draw"):
        similarity_map(comparison(()), ["A"], tmp_path / "map.png")
    assert not list(tmp_path.iterdir())
