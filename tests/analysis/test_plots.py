"""Figures of lines and languages: what matplotlib's objects hold, and files that are whole and repeatable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prunecli.analysis.plots import (
    CurvePoint,
    Speed,
    languages_figure,
    save_figure,
    score_figure,
    speed_figure,
)
from prunecli.errors import PruneError

pytest.importorskip("matplotlib")

POINTS = [
    CurvePoint(0.0, {"chrF++": 60.0, "BLEU": 40.0}, ("encoder", "cross"), is_original=True),
    CurvePoint(0.5, {"chrF++": 40.0, "BLEU": 20.0}, ("encoder",)),
    CurvePoint(0.2, {"chrF++": 55.0, "BLEU": 35.0}, ("encoder",)),
    CurvePoint(0.3, {"chrF++": 30.0, "BLEU": 10.0}, ("cross",)),
]
SPEEDS = [
    Speed(name, size, f"beam {beam}", 10.0 * size + beam, 1.5)
    for name in ("whole", "less")
    for size in (8, 1, 2)
    for beam in (1, 5)
]


def lines(axes) -> dict[str, list[tuple[float, float]]]:
    return {
        line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def test_scores_against_what_was_removed():
    chrf, bleu = score_figure(POINTS).axes
    assert lines(chrf) == {"encoder": [(0, 60), (20, 55), (50, 40)], "cross": [(0, 60), (30, 30)]}
    assert lines(bleu) == {"encoder": [(0, 40), (20, 35), (50, 20)], "cross": [(0, 40), (30, 10)]}
    (whole,) = (line for line in chrf.get_lines() if line.get_linestyle() == "--")
    assert list(whole.get_ydata()) == [60, 60]
    assert chrf.get_xlabel() == "heads removed, %"
    assert chrf.get_ylabel() == "chrF++ (axis from 28.5)"
    assert [text.get_text() for text in chrf.get_legend().get_texts()] == ["encoder", "cross"]


def test_the_order_by_ablation_is_dashed():
    points = [
        CurvePoint(0.0, {"BLEU": 40.0}, ("gradient", "ablation"), is_original=True),
        CurvePoint(0.5, {"BLEU": 30.0}, ("gradient",)),
        CurvePoint(0.5, {"BLEU": 20.0}, ("ablation",), is_dashed=True),
    ]
    (axes,) = score_figure(points).axes
    styles = {line.get_label(): line.get_linestyle() for line in axes.get_lines()}
    assert (styles["gradient"], styles["ablation"]) == ("-", "--")


def test_a_single_line_needs_no_legend():
    (axes,) = score_figure([CurvePoint(0.1, {"accuracy": -0.9})], unit="experts").axes
    assert axes.get_legend() is None
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("experts removed, %", "accuracy")


def test_speed_against_batch_size_with_its_deviation():
    one, five = speed_figure(SPEEDS).axes
    assert [one.get_title(), five.get_title()] == ["beam 1", "beam 5"]
    whole, less = five.containers
    assert [whole.get_label(), less.get_label()] == ["whole", "less"]
    assert list(whole.lines[0].get_xdata()) == [1, 2, 8]
    assert list(whole.lines[0].get_ydata()) == [15, 25, 85]
    assert [[y for _, y in segment] for segment in whole.lines[2][0].get_segments()] == [
        [13.5, 16.5],
        [23.5, 26.5],
        [83.5, 86.5],
    ]
    assert five.get_xscale() == "log"
    assert [label.get_text() for label in five.get_xticklabels()] == ["1", "2", "8"]
    assert five.get_ylim()[0] == 0


def test_languages_have_a_panel_for_each_part():
    tree = (["a", "b", "c"], np.array([[0, 2, 0.5, 2], [1, 3, 1.25, 3]]))
    experts = (["model.encoder.layers.1.ffn", "model.decoder.layers.3.ffn"], [36.5, 12.0])
    matrix = np.array([[np.nan, 0.25], [0.5, np.nan]])
    figure = languages_figure({"Sources": tree}, experts, (["a-b", "b-c"], matrix))
    dendrogram, bars, heat, unused, colours = figure.axes
    assert dendrogram.get_title() == "Sources"
    assert [label.get_text() for label in dendrogram.get_yticklabels()] == ["b", "a", "c"]
    branches = [path for lines in dendrogram.collections for path in lines.get_paths()]
    assert max(distance for path in branches for distance, _ in path.vertices) == 1.25
    assert [bar.get_height() for bar in bars.patches] == [36.5, 12.0]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["encoder 1", "decoder 3"]
    np.testing.assert_array_equal(heat.images[0].get_array().filled(np.nan), matrix)
    assert [label.get_text() for label in heat.get_yticklabels()] == ["a-b", "b-c"]
    assert (unused.get_visible(), colours.get_visible()) == (False, True)


def test_names_in_a_tree_have_the_colour_of_their_family():
    tree = (["a", "b", "c"], np.array([[0, 2, 0.5, 2], [1, 3, 1.25, 3]]))
    families = {"z": "Turkic", "a": "Bantu", "b": "Slavic", "c": "Bantu"}
    (axes,) = languages_figure({"Sources": tree}, None, None, families).axes
    colours = {label.get_text(): label.get_color() for label in axes.get_yticklabels()}
    assert colours["a"] == colours["c"] != colours["b"]
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["Bantu", "Slavic"]
    assert [patch.get_facecolor() for patch in legend.get_patches()] == [colours["a"], colours["b"]]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: score_figure([]),
        lambda: speed_figure([]),
        lambda: languages_figure({}, None, None),
    ],
)
def test_nothing_to_draw_is_said(draw):
    with pytest.raises(PruneError, match="nothing to draw"):
        draw()


def test_equal_figures_make_equal_files(tmp_path: Path):
    for name in ("one.png", "two.png"):
        save_figure(speed_figure(SPEEDS[:2]), tmp_path / name)
    one, two = (tmp_path / "one.png", tmp_path / "two.png")
    assert one.read_bytes() == two.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "two.png"]
