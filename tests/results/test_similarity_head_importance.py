"""Importance of heads on two texts: correlations as restated, and the scatter plot."""

from math import sqrt

import numpy as np
import pytest
from scipy.stats import rankdata, t

from prunecli.errors import StatisticsError
from prunecli.report.pictures import pictures_of
from prunecli.results.similarity import compare_heads
from prunecli.results.unit_scores import Scores
from tests.pictures import drawn
from tests.scores import scores_by_hand

ENCODER, CROSS = "model.encoder.layers.0.self_attn", "model.decoder.layers.0.cross_attention"
DECODER = "model.decoder.layers.0.self_attn"
FIRST = {ENCODER: [1.0, 2.0, 3.0, 0.5], DECODER: [2.0, 2.0], CROSS: [5.0, 1.0, 4.0]}
SECOND = {ENCODER: [0.5, 2.5, 2.0, 0.5], DECODER: [1.0, 3.0], CROSS: [2.0, 2.0, 2.0]}
FILES = ("news.json", "chat.json")


def scores(values: dict[str, list[float]], **changes) -> Scores:
    fields = {"model_type": "nllb-moe", "task": "translation", "examples": 1}
    return scores_by_hand(values, **{**fields, **changes})


def test_correlations_of_all_heads_and_by_kind():
    comparison = compare_heads((scores(FIRST), scores(SECOND)), FILES)
    everything, encoder, decoder, cross = comparison.correlations
    assert [one.of for one in comparison.correlations] == ["all", "encoder", "decoder", "cross"]
    for found, names in ((everything, FIRST), (encoder, [ENCODER])):
        first, second = ([x for name in names for x in values[name]] for values in (FIRST, SECOND))
        assert found.heads == len(first)
        for own, p_value, pair in (
            (found.pearson, found.pearson_p, (first, second)),
            (found.spearman, found.spearman_p, (rankdata(first), rankdata(second))),
        ):
            r, degrees = np.corrcoef(*pair)[0, 1], len(first) - 2
            assert own == pytest.approx(r, abs=1e-6)
            assert p_value == pytest.approx(2 * t.sf(abs(r) * sqrt(degrees / (1 - r * r)), degrees), abs=1e-8)
    assert decoder.pearson is None  # two heads lie on a line always
    # All are the same on the second text.
    assert (cross.heads, cross.pearson, cross.spearman_p) == (3, None, None)
    last = comparison.heads[-1]
    assert (last.layer, last.kind, last.head) == (0, "cross", 2)
    assert comparison.frame("correlations")["pearson"].tolist()[0] == everything.pearson


def test_heads_are_matched_by_their_original_ids():
    pruned = scores({ENCODER: [3.0, 1.0, 2.0]}, ids={ENCODER: (2, 0, 1)}, fingerprint="sha256:01")
    comparison = compare_heads((scores(FIRST), pruned), FILES)
    found = [(one.head, one.first, one.second) for one in comparison.heads]
    assert found == [(0, 1, 1), (1, 2, 2), (2, 3, 3)]
    assert comparison.left_out == 6
    assert comparison.correlations[0].pearson == 1
    assert comparison.correlations[0].pearson_p == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (scores(SECOND, model_type="bart"), "of the type nllb-moe, chat.json of the type bart"),
        (scores({"model.encoder.layers.7.self_attn": [1.0]}), "no head in common"),
        (scores(SECOND, method="all-but-one", metric="loss", base=1.0), "heads of one layer with each other"),
    ],
)
def test_refused(second, message):
    with pytest.raises(StatisticsError, match=message):
        compare_heads((scores(FIRST), second), FILES)


def test_a_point_for_each_head():
    pytest.importorskip("altair")
    ablated = scores(SECOND, method="ablation", metric="loss", base=0.0)
    comparison = compare_heads((scores(FIRST), ablated), FILES)
    ((picture,),) = pictures_of(comparison)
    chart = picture.specification(400)
    series = {}
    for row in drawn(chart, "point"):
        series.setdefault(row["series"], []).append((row["x"], row["y"]))
    points = [list(zip(FIRST[name], SECOND[name], strict=True)) for name in (ENCODER, DECODER, CROSS)]
    assert list(series.values()) == points
    encoding = chart["layer"][-1]["encoding"]
    assert encoding["x"]["title"] == "news.json: I_h"
    assert encoding["y"]["title"] == "chat.json: loss gained without the head"
    encoder, decoder, _ = series
    known = comparison.correlations[1]
    assert encoder == f"encoder self-attention, r = {known.pearson:.2f} (p = {known.pearson_p:.2g})"
    assert decoder == "decoder self-attention"
