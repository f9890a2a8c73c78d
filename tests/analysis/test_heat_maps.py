"""Heat maps: their cells, names and colours as matplotlib's objects hold them."""

from __future__ import annotations

import numpy as np
import pytest

from prunecli.analysis.components import Component, Kind
from prunecli.analysis.heat_maps import (
    correlation_figure,
    head_figure,
    similarity_figure,
    similarity_panels,
)
from prunecli.analysis.model_similarity import Comparison
from prunecli.architectures import FAMILIES
from prunecli.architectures.records import Side
from prunecli.errors import PruneError
from prunecli.model.attention import AttentionKind, AttentionLayer

pytest.importorskip("matplotlib")

NAN = float("nan")


def cells(axes):
    (image,) = axes.images
    return image.get_array().filled(np.nan)


def names(labels) -> list[str]:
    return [label.get_text() for label in labels]


def layer(kind: AttentionKind, number: int, heads: tuple[int, ...], original: int = 3) -> AttentionLayer:
    stack = FAMILIES["bart"].stacks[kind != "encoder"]
    name = f"{kind}.{number}"
    return AttentionLayer(
        name, kind, number, heads, original, original, {}, f"{name}.out", stack, stack.attentions[0], name
    )


LAYERS = (
    layer("encoder", 0, (0, 1, 2)),
    layer("encoder", 1, ()),
    layer("encoder", 2, (2, 0)),
    layer("cross", 0, (1,)),
)
VALUES = {"encoder.0": [1.0, 2.0, 3.0], "encoder.1": [], "encoder.2": [5.0, 4.0], "cross.0": [-1.0]}


def test_heads_lie_at_their_original_places_on_one_scale_that_is_white_at_0():
    figure = head_figure(VALUES, LAYERS, "Importance of heads")
    encoder, cross, _ = figure.axes
    assert (encoder.get_title(), cross.get_title()) == ("encoder self-attention", "cross-attention")
    np.testing.assert_array_equal(cells(encoder), [[1, 2, 3], [NAN, NAN, NAN], [4, NAN, 5]])
    np.testing.assert_array_equal(cells(cross), [[NAN, -1, NAN]])
    assert [axes.images[0].get_clim() for axes in (encoder, cross)] == [(-5, 5), (-5, 5)]
    assert encoder.images[0].get_cmap().name == "RdBu_r"
    assert (encoder.get_xlabel(), encoder.get_ylabel()) == ("head", "layer")
    assert figure.get_suptitle() == "Importance of heads"


def test_a_histogram_counts_every_head_once_by_kind():
    encoder, cross, counts, _ = head_figure(VALUES, LAYERS, "Change", "change of BLEU").axes
    assert (encoder.get_title(), cross.get_title()) == ("encoder self-attention", "cross-attention")
    first, second = counts.containers
    assert (sum(bar.get_height() for bar in first), sum(bar.get_height() for bar in second)) == (5, 1)
    lowest = next(bar for bar in second if bar.get_height())
    assert lowest.get_x() == -1  # the cross-attention's only head
    assert (counts.get_xlabel(), counts.get_ylabel()) == ("change of BLEU", "heads")
    assert [text.get_text() for text in counts.get_legend().get_texts()] == [
        encoder.get_title(),
        cross.get_title(),
    ]


@pytest.mark.parametrize(
    ("values", "limits", "colours"),
    [([0.0, 2.0, 1.0], (0, 2), "viridis"), ([-1.0, -3.0, -2.0], (-3, 0), "viridis_r")],
)
def test_scores_on_one_side_of_0_are_coloured_from_0(values, limits, colours):
    image = head_figure({"encoder.0": values}, LAYERS, "").axes[0].images[0]
    assert (image.get_clim(), image.get_cmap().name) == (limits, colours)


def test_of_many_layers_only_some_are_numbered():
    many = tuple(layer("encoder", number, (0,)) for number in range(90))
    axes = head_figure({one.name: [1.0] for one in many}, many, "").axes[0]
    assert list(axes.get_yticks()) == list(range(0, 90, 3))


def part(side: Side, layer: int, kind: Kind) -> Component:
    return Component(f"{side}.{layer}.{kind}", side, layer, kind, f"{side}.{layer}", f"{side}.{layer}.{kind}")


FIRST = (part("encoder", 0, "self"), part("encoder", 0, "ffn"), part("decoder", 0, "cross"))
SECOND = (part("encoder", 0, "self"), part("decoder", 0, "cross"), part("decoder", 0, "ffn"))


def comparison(first: tuple[Component, ...], second: tuple[Component, ...] = ()) -> Comparison:
    count = len(first) + len(second)
    matrix = np.arange(count * count, dtype=np.float64).reshape(count, count) / max(1, count * count)
    return Comparison(first, second, ((), ()), (4, 4), {"cka": matrix})


def test_panels_of_two_models():
    rows = similarity_panels(comparison(FIRST, SECOND), ["A", "B"])
    assert [[(panel.title, panel.names) for panel in row] for row in rows] == [
        [("CKA, encoder", ("A", "A")), ("CKA, encoder", ("B", "B")), ("CKA, encoder", ("A", "B"))],
        [("CKA, decoder", ("A", "A")), ("CKA, decoder", ("B", "B")), ("CKA, decoder", ("A", "B"))],
    ]
    np.testing.assert_array_equal(rows[1][2].values * 36, [[16, 17]])
    np.testing.assert_array_equal(rows[1][1].values * 36, [[28, 29], [34, 35]])


def test_one_model_has_its_sides_beside_each_other():
    (row,) = similarity_panels(comparison(FIRST), ["A"])
    assert [panel.title for panel in row] == ["CKA, encoder", "CKA, decoder"]
    assert all(panel.names == ("A", "A") for panel in row)


def test_similarities_are_drawn_from_0_to_1_with_both_models_named():
    figure = similarity_figure(comparison(FIRST, SECOND), ["A", "B"])
    between = figure.axes[2]
    np.testing.assert_array_equal(cells(between) * 36, [[3], [9]])
    assert (names(between.get_yticklabels()), names(between.get_xticklabels())) == (
        ["0.sa", "0.ffn"],
        ["0.sa"],
    )
    assert (between.get_ylabel(), between.get_xlabel()) == ("A", "B")
    assert {axes.images[0].get_clim() for axes in figure.axes[:6]} == {(0, 1)}


def test_panels_that_a_row_lacks_are_hidden():
    second = (part("encoder", 0, "self"),)
    figure = similarity_figure(comparison(FIRST, second), ["A", "B"])
    assert [axes.get_visible() for axes in figure.axes[:6]] == [True, True, True, True, False, False]


def test_of_many_components_only_some_are_named():
    parts = tuple(part("decoder", layer, "self") for layer in range(90))
    (axes, *_) = similarity_figure(comparison(parts), ["A"]).axes
    assert names(axes.get_yticklabels()) == [f"{layer}.sa" for layer in range(0, 90, 3)]
    assert cells(axes).shape == (90, 90)


def test_correlations_are_drawn_from_0_to_1_under_their_mean():
    maps = {"original": np.eye(3), "DeFINE": np.full((2, 2), 0.25)}
    figure = correlation_figure([maps], "Correlation of the dimensions")
    first, second, _ = figure.axes
    np.testing.assert_array_equal(cells(first), np.eye(3))
    assert first.get_title() == "original\nmean beside the diagonal 0.000"
    assert second.get_title() == "DeFINE\nmean beside the diagonal 0.250"
    assert first.images[0].get_clim() == second.images[0].get_clim() == (0, 1)
    assert figure.get_suptitle() == "Correlation of the dimensions"


def test_rows_of_correlations_lie_below_each_other():
    rows = [{"unit": np.eye(3)}, {"map layer": np.eye(2), "expansion layer 1": np.ones((4, 4))}, {}]
    figure = correlation_figure(rows, "")
    shown = [axes for axes in figure.axes[:4] if axes.get_visible()]
    assert [axes.get_title().splitlines()[0] for axes in shown] == ["unit", "map layer", "expansion layer 1"]
    assert [len(cells(axes)) for axes in shown] == [3, 2, 4]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: head_figure({"encoder.1": []}, LAYERS, "Heads"),
        lambda: similarity_figure(comparison(()), ["A"]),
    ],
)
def test_nothing_to_draw_is_said(draw):
    with pytest.raises(PruneError, match="nothing to draw"):
        draw()
