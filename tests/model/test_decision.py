"""Ranks, cut-offs and margins, beside those found by counting; what was chosen is what they say."""

import numpy as np
import pytest

from prunecli.model.decision import Decision, Ranked
from tests.reference import ranking


@pytest.mark.parametrize("seed", range(8))
def test_ranks_cutoff_and_margins_are_those_of_counting(seed):
    generator = np.random.default_rng(seed)
    # Many equal values, and as many cuts as there can be: two places cut together, one alone.
    places = [
        Ranked.of(
            (f"layer.{number}", "decoder", number),
            generator.permutation(20)[:12].tolist(),
            (),
            generator.integers(0, 6, 12).astype(float),
            cut="both" if number < 2 else "",
        )
        for number in range(3)
    ]
    marked = [
        Ranked.of(
            (place.name, place.side, place.layer),
            place.ids.tolist(),
            place.ids[generator.random(12) < (0.5, 0.9, 0.2)[seed % 3]].tolist(),
            place.values,
            cut=place.cut,
        )
        for place in places
    ]
    decision = Decision("expert", tuple(marked), "value")
    for together in ((0, 1), (2,)):
        values = []
        kept = []
        for index in together:
            own = marked[index].values
            values += own.tolist()
            kept += marked[index].kept.tolist()
        ranks = [ranking.rank(values, kept, at) for at in range(len(values))]
        found = [rank for index in together for rank in np.asarray(decision.places[index].ranks).tolist()]
        assert found == ranks
        bound = ranking.cutoff(values, kept)
        for index in together:
            assert decision.places[index].cutoff == bound
            margins = decision.places[index].margins
            if bound is None:
                assert margins is None
            else:
                np.testing.assert_array_equal(np.asarray(margins), np.asarray(marked[index].values) - bound)


def test_what_is_asked_for_is_the_cutoff_and_no_values_have_none():
    place = Ranked.of(("", "", None), [0, 1, 2], [0, 1], [0.0, 5.0, 1.0])
    assert Decision("token", (place,), "count", bound=2).places[0].cutoff == 2
    (unknown,) = Decision("expert", (Ranked.of(("a", "decoder", 0), [3, 1], [3]),), how="drawn").places
    assert (unknown.ranks, unknown.margins, unknown.cutoff) == (None, None, None)
    assert unknown.kept.tolist() == [False, True]
