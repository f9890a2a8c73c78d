"""The heat map of heads: its grids by hand, its file whole and repeatable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prunecli.analysis.head_plots import head_grids, head_map
from prunecli.architectures import FAMILIES
from prunecli.errors import PruneError
from prunecli.model.attention import AttentionKind, AttentionLayer
from tests.pictures import pixels

NAN = float("nan")


def layer(kind: AttentionKind, number: int, heads: tuple[int, ...], original: int = 3) -> AttentionLayer:
    stack = FAMILIES["bart"].stacks[kind != "encoder"]
    name = f"{kind}.{number}"
    return AttentionLayer(
        name, kind, number, heads, original, original, {}, f"{name}.out", stack, stack.attentions[0]
    )


LAYERS = (
    layer("encoder", 0, (0, 1, 2)),
    layer("encoder", 1, ()),
    layer("encoder", 2, (2, 0)),
    layer("cross", 0, (1,)),
)
VALUES = {"encoder.0": [1.0, 2.0, 3.0], "encoder.1": [], "encoder.2": [5.0, 4.0], "cross.0": [-1.0]}


def test_grids_have_heads_at_their_original_places() -> None:
    found = head_grids(VALUES, LAYERS)
    assert list(found) == ["encoder", "cross"]
    np.testing.assert_array_equal(found["encoder"], [[1, 2, 3], [NAN, NAN, NAN], [4, NAN, 5]])
    np.testing.assert_array_equal(found["cross"], [[NAN, -1, NAN]])


def test_layers_without_values_stay_blank() -> None:
    found = head_grids({"encoder.2": [5.0, 4.0]}, LAYERS)
    np.testing.assert_array_equal(found["encoder"], [[NAN] * 3, [NAN] * 3, [4, NAN, 5]])


@pytest.mark.parametrize("values", [VALUES, {"encoder.0": [0.0, 0.0, 0.0]}, {"cross.0": [-1.0]}])
def test_the_file_is_a_png_and_equal_for_equal_values(values: dict[str, list[float]], tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        head_map(values, LAYERS, tmp_path / name, "Importance of heads")
    one, two = ((tmp_path / name).read_bytes() for name in ("one.png", "two.png"))
    assert one == two
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "two.png"]
    head_map({"encoder.0": [0.0, 2.0, 1.0]}, LAYERS, tmp_path / "other.png", "Importance of heads")
    assert not np.array_equal(pixels(tmp_path / "one.png"), pixels(tmp_path / "other.png"))


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(PruneError, match="nothing to draw"):
        head_map({"encoder.1": []}, LAYERS, tmp_path / "map.png", "Heads")
    assert not list(tmp_path.iterdir())


def test_values_that_do_not_fit_the_heads_are_a_fault() -> None:
    with pytest.raises(ValueError):
        head_grids({"encoder.0": [1.0, 2.0]}, LAYERS)
