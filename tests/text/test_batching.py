from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from prunecli.text.batching import length_bucketed

LENGTHS = st.lists(st.integers(1, 60), max_size=80)


@given(LENGTHS, st.integers(1, 200), st.none() | st.integers(1, 9))
def test_every_index_once_within_the_budget_longest_first(lengths, max_tokens, max_sentences):
    batches = length_bucketed(lengths, max_tokens, max_sentences)
    flat = [index for batch in batches for index in batch]
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[i] for i in flat] == sorted(lengths, reverse=True)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= max_tokens
        assert max_sentences is None or len(batch) <= max_sentences


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1), st.integers(1, 200))
def test_pairs_stay_within_the_budget_on_both_sides(lengths, max_tokens):
    for batch in length_bucketed(lengths, max_tokens):
        longest = max(max(lengths[i]) for i in batch)
        assert len(batch) == 1 or len(batch) * longest <= max_tokens


@given(LENGTHS, st.integers(1, 200))
def test_batches_are_as_full_as_the_order_allows(lengths, max_tokens):
    batches = length_bucketed(lengths, max_tokens)
    for batch, following in itertools.pairwise(batches):
        assert following
        assert (len(batch) + 1) * lengths[batch[0]] > max_tokens
