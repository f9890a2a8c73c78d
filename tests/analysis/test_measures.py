"""Linear CKA against the HSIC of Gram matrices, and what must leave it as it is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prunecli.analysis import measures
from prunecli.analysis.language_comparison import cluster, jaccard_matrix, spread_by_relation
from prunecli.analysis.measures import constant, linear_cka, local_neighbourhood_similarity, neighbour_count
from prunecli.errors import UsageError
from tests.reference import similarity as reference


def random_features(seed: int, sentences: int, widths: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [
        (generator.standard_normal((sentences, width)) + generator.standard_normal(width)).astype(np.float32)
        for width in widths
    ]


seeds = st.integers(0, 10**6)
widths = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple)


@settings(max_examples=30)
@given(seeds, st.integers(3, 20), widths)
def test_it_is_the_hsic_of_gram_matrices(seed, sentences, chosen):
    features = random_features(seed, sentences, chosen)
    expected = [[reference.gram_cka(x.tolist(), y.tolist()) for y in features] for x in features]
    np.testing.assert_allclose(linear_cka(features), expected, rtol=1e-6, atol=1e-9)


def test_outputs_that_never_change_have_no_similarity():
    features = random_features(1, 10, (4, 4))
    features.append(np.tile(features[0][:1], (10, 1)))
    features.append(np.zeros((10, 3), np.float32))
    np.testing.assert_array_equal(constant(features), [False, False, True, True])
    found = linear_cka(features)
    assert np.isnan(found[2:]).all()
    assert np.isnan(found[:, 2:]).all()
    assert np.isfinite(found[:2, :2]).all()


def test_a_small_change_on_a_large_mean_is_seen():
    (small,) = random_features(2, 30, (5,))
    large = (small + np.float32(1000)).astype(np.float32)
    assert linear_cka([small, large])[0, 1] == pytest.approx(1, abs=1e-3)


# Neighbours against a search with sets, ties included.


def expected(features: list[np.ndarray], k: int) -> list[list[float]]:
    return [[reference.lns(x.tolist(), y.tolist(), k) for y in features] for x in features]


@settings(max_examples=30)
@given(seeds, st.integers(4, 16), st.data())
def test_it_is_a_search_with_sets(seed, sentences, data):
    k = data.draw(st.integers(1, sentences - 1))
    features = random_features(seed, sentences, (2, 5, 30))
    np.testing.assert_allclose(local_neighbourhood_similarity(features, k), expected(features, k), rtol=1e-12)


@settings(max_examples=30)
@given(seeds, st.integers(1, 8), st.integers(1, 3000))
def test_ties_go_to_the_first_whatever_the_blocks(seed, k, block_bytes):
    # Few directions, each of several sentences: most cosines are equal to others.
    rows = np.random.default_rng(seed).integers(-1, 2, (9, 2)).astype(np.float32) + np.float32(0.5)
    other = np.random.default_rng(seed + 1).integers(-1, 2, (9, 3)).astype(np.float32) + np.float32(0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measures, "BLOCK_BYTES", block_bytes)
        found = local_neighbourhood_similarity([rows, other], k)
    np.testing.assert_allclose(found, expected([rows, other], k), rtol=1e-12)


@pytest.mark.parametrize(("share", "sentences", "k"), [(0.05, 2037, 102), (0.05, 20, 1), (0.29, 100, 29)])
def test_the_number_of_neighbours(share, sentences, k):
    assert neighbour_count(share, sentences) == k


def test_a_share_that_makes_all_is_refused():
    with pytest.raises(UsageError, match="neighbours=1` of 50"):
        neighbour_count(1.0, 50)


# What languages' experts have in common: against the slow restatement, sets counted and trees drawn by
# hand.


sets = st.sets(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 7)))
LINE = {"far": np.array([10.0]), "a": np.array([0.0]), "b": np.array([1.0]), "c": np.array([4.0])}


@given(st.lists(sets, max_size=5))
def test_matrix_is_symmetric_with_ones_on_the_diagonal(selections):
    members = [(name, number) for name in "ab" for number in range(8)]
    held = [[member in selection for member in members] for selection in selections]
    matrix = jaccard_matrix(np.array(held, bool).reshape(len(selections), len(members)))
    assert matrix.shape == (len(selections), len(selections))
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(np.diag(matrix), 1)
    for row, first in enumerate(selections):
        for column, second in enumerate(selections):
            assert matrix[row, column] == reference.jaccard(first, second)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=2, max_size=9, unique=True)
)
def test_spreads_against_every_two_pairs_one_by_one(pairs):
    matrix = np.random.default_rng(0).random((len(pairs), len(pairs)))
    found = spread_by_relation(pairs, matrix)
    for relation, values in reference.by_relation(pairs, matrix.tolist()).items():
        if values:
            expected = {"mean": sum(values) / len(values), "lowest": min(values), "highest": max(values)}
            expected["comparisons"] = len(values)
            assert found[relation].to_json() == pytest.approx(expected, abs=1e-6)
        else:
            assert found[relation] is None


def test_tree_of_four_points_on_a_line():
    # a and b join at 1, with c at mean(4, 3) = 3.5, with far at mean(10, 9, 6) = 8.333.
    found = cluster(LINE, "average")
    lines = "8.333|├─ 3.500|│  ├─ 1.000|│  │  ├─ a|│  │  └─ b|│  └─ c|└─ far"
    assert list(found.blocks(""))[1].splitlines() == lines.split("|")
    assert found.clusters["members"][1] == "far"
    assert found.clusters["members"][0]["distance"] == pytest.approx(3.5)


def test_fewer_than_two_languages_have_no_tree():
    assert cluster({"a": LINE["a"]}) is None
