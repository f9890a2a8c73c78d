from __future__ import annotations

import random
from itertools import permutations

import pandas as pd
import pytest

from prunecli.evaluation.scoring import grouped_means
from tests.reference.group_means import mean_of

LANGUAGES = ("eng", "fra", "wol", "zul")
GROUPS = {"wol": "low", "eng": "high", "zul": "low", "fra": "high"}
NAMES = ("chrf++", "bleu", "length_ratio", "over_generated")


def drawn(pairs):
    draw = random.Random(3)
    rows = [[100 * draw.random(), 100 * draw.random(), 2 * draw.random(), draw.random()] for _ in pairs]
    return pd.DataFrame(rows, columns=NAMES, index=pd.MultiIndex.from_tuples(pairs))


def plain(scores):
    return {f"{source}-{target}": dict(row) for (source, target), row in scores.iterrows()}


@pytest.mark.parametrize("left_out", [0, 3])
def test_means_against_their_definition(left_out):
    scores = drawn(list(permutations(LANGUAGES, 2))[left_out:])
    found, pairs, everything = grouped_means(scores, GROUPS), plain(scores), set(LANGUAGES)
    for name in NAMES:
        for language, mean in found["by_source"].items():
            assert mean[name] == pytest.approx(mean_of(pairs, name, {language}, everything), abs=1e-4)
        for language, mean in found["by_target"].items():
            assert mean[name] == pytest.approx(mean_of(pairs, name, everything, {language}), abs=1e-4)
        for mean in found["by_group"]:
            of = [{one for one in LANGUAGES if GROUPS[one] == mean[side]} for side in ("source", "target")]
            assert mean[name] == pytest.approx(mean_of(pairs, name, *of), abs=1e-4)
    assert "difference" not in found["by_group"][0]
    for means in (found["by_source"].values(), found["by_target"].values(), found["by_group"]):
        assert sum(mean["pairs"] for mean in means) == len(pairs)


@pytest.mark.parametrize("pairs", [[("a", "b")], [("a", "b"), ("a", "c")], [("b", "a"), ("c", "a")]])
def test_one_source_or_target_says_nothing_without_groups(pairs):
    assert grouped_means(drawn(pairs), {}) == {}
