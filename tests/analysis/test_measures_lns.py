"""Neighbours against a search with sets, ties included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prunecli.analysis.measures import local_neighbourhood_similarity, neighbour_count
from prunecli.errors import UsageError
from tests.analysis.test_measures_cka import random_features
from tests.reference import similarity as reference


def expected(features: list[np.ndarray], k: int) -> list[list[float]]:
    return [[reference.lns(x.tolist(), y.tolist(), k) for y in features] for x in features]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(4, 16), st.data())
def test_it_is_a_search_with_sets(seed, sentences, data):
    k = data.draw(st.integers(1, sentences - 1))
    features = random_features(seed, sentences, (2, 5, 30))
    np.testing.assert_allclose(local_neighbourhood_similarity(features, k), expected(features, k), rtol=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 3000))
def test_ties_go_to_the_first_whatever_the_blocks(seed, k, block_bytes):
    # Few directions, each of several sentences: most cosines are equal to others.
    rows = np.random.default_rng(seed).integers(-1, 2, (9, 2)).astype(np.float32) + np.float32(0.5)
    other = np.random.default_rng(seed + 1).integers(-1, 2, (9, 3)).astype(np.float32) + np.float32(0.5)
    found = local_neighbourhood_similarity([rows, other], k, block_bytes=block_bytes)
    np.testing.assert_allclose(found, expected([rows, other], k), rtol=1e-12)


@pytest.mark.parametrize(("share", "sentences", "k"), [(0.05, 2037, 102), (0.05, 20, 1), (0.29, 100, 29)])
def test_the_number_of_neighbours(share, sentences, k):
    assert neighbour_count(share, sentences) == k


@pytest.mark.parametrize(("share", "sentences"), [(0.01, 20), (1.0, 50)])
def test_a_share_that_makes_none_or_all_is_refused(share, sentences):
    with pytest.raises(UsageError, match=f"neighbours={share:g}` of {sentences}"):
        neighbour_count(share, sentences)
