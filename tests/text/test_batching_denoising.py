"""Spans of text masked as for an encoder with a decoder that restores them."""

from __future__ import annotations

from typing import Any

import pytest

from prunecli.errors import UnsupportedModelError
from prunecli.text.batching import Marks, marks_of, masked

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
def test_both_sides_together_are_the_text(length: int) -> None:
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


def test_sentinels_are_the_tokenizers_in_order() -> None:
    assert marks_of(_Tokenizer("<extra_id_1>", "a", "<extra_id_0>", "<extra_id_3>")) == Marks((2, 0), END)


def test_a_tokenizer_without_sentinels_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no <extra_id_0>"):
        marks_of(_Tokenizer("a"))
