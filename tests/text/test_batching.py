import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import UnsupportedModelError
from prunecli.text.batching import Marks, length_bucketed, marks_of, masked

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


@given(LENGTHS, st.integers(1, 200))
def test_batches_are_as_full_as_the_order_allows(lengths, max_tokens):
    batches = length_bucketed(lengths, max_tokens)
    for batch, following in itertools.pairwise(batches):
        assert following
        assert (len(batch) + 1) * lengths[batch[0]] > max_tokens


END = 1
MARKS = Marks(tuple(range(1000, 1100)), END)


def restored(inputs: list[int], targets: list[int]) -> list[int]:
    """The text that both sides say together: each sentinel of the one replaced by what the other has after it."""
    spans: dict[int, list[int]] = {}
    for token in targets:
        if token in MARKS.sentinels:
            sentinel = token
        else:
            spans.setdefault(sentinel, []).append(token)
    return [piece for token in inputs for piece in spans.get(token, [token])]


@pytest.mark.parametrize("length", [1, 7, 64])
def test_both_sides_together_are_the_text(length):
    window = [number % 900 + 2 for number in range(length)]
    inputs, targets = masked([*window, END], MARKS)
    assert inputs[-1] == targets[-1] == END
    assert restored(inputs[:-1], targets[:-1]) == window
    used = [token for token in inputs if token in MARKS.sentinels]
    assert used == [token for token in targets if token in MARKS.sentinels] == [*MARKS.sentinels[: len(used)]]
    hidden = len(targets) - 1 - len(used)
    assert hidden == max(1, round(0.15 * length))
    assert len(used) == max(1, min(round(hidden / 3), 100))


class _Tokenizer:
    eos_token_id = END

    def __init__(self, *names: str) -> None:
        self._names = names

    def get_vocab(self) -> dict[str, Any]:
        return {name: number for number, name in enumerate(self._names)}


def test_sentinels_are_the_tokenizers_in_order():
    assert marks_of(_Tokenizer("<extra_id_1>", "a", "<extra_id_0>", "<extra_id_3>")) == Marks((2, 0), END)


def test_a_tokenizer_without_sentinels_is_refused():
    with pytest.raises(UnsupportedModelError, match="no <extra_id_0>"):
        marks_of(_Tokenizer("a"))
