"""Which tokens the kept ones need; the oracles are the libraries that cut text."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordPiece

from prunecli.errors import UnsupportedModelError
from prunecli.methods.vocabulary.tokenizer import of_backend, read_model
from tests.methods.vocabulary.makers import TEXT, sentencepiece_model


@st.composite
def bpes(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of three letters and of random merges of what there is."""
    vocab = {letter: number for number, letter in enumerate("abc")}
    merges: list[tuple[str, str]] = []
    for _ in range(draw(st.integers(1, 14))):
        pair = (draw(st.sampled_from(sorted(vocab))), draw(st.sampled_from(sorted(vocab))))
        if pair not in merges:
            merges.append(pair)
            vocab.setdefault("".join(pair), len(vocab))
    return vocab, merges


@settings(max_examples=40)
@given(bpes(), st.text("abc", min_size=1, max_size=12))
def test_the_closure_holds_nothing_idle(bpe, word):
    """The closure holds the parts of each of its tokens, down to single letters."""
    vocab, merges = bpe
    full = Tokenizer(BPE(vocab=vocab, merges=merges))
    seen = set(full.encode(word).tokens)
    closure = of_backend(full).closure(seen)
    used = {token for token in closure if any(token in other for other in closure - {token})}
    assert closure - seen <= used
    for token in closure - seen:
        assert full.encode(token).tokens == [token]


def test_unigram_keeps_the_least_likely_piece():
    """An unknown character costs 10 more than it."""
    pieces = [("<unk>", 0.0), ("a", -2.0), ("ab", -3.0), ("xyz", -9.5), ("<0x41>", -4.0)]
    vocabulary = of_backend(Tokenizer(Unigram(pieces, unk_id=0)))
    assert vocabulary.always == {"a", "xyz", "<unk>", "<0x41>"}
    assert vocabulary.closure(["ab"]) == {"ab"}


def test_wordpiece_keeps_letters_at_the_beginning_and_inside():
    vocab = {token: number for number, token in enumerate(["[UNK]", "a", "##b", "##bc", "ab", "##"])}
    vocabulary = of_backend(Tokenizer(WordPiece(vocab, unk_token="[UNK]")))
    assert vocabulary.always == {"a", "##b"}


class Backend:
    """Says of its model what it is told to."""

    def __init__(self, **model: Any) -> None:
        self.model = model

    def to_str(self) -> str:
        return json.dumps({"model": self.model})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"type": "BPE", "end_of_word_suffix": "</w>"}, 'BPE tokenizer has a "end_of_word_suffix"'),
        ({"type": "BPE", "continuing_subword_prefix": "@@"}, 'has a "continuing_subword_prefix"'),
        ({"type": "Unigram", "vocab": [["a", 0.0], ["a", -1.0]]}, "holds a piece twice"),
        ({"type": "Bigram"}, 'of the kind "Bigram"'),
        ({}, 'of the kind "None"'),
    ],
)
def test_models_of_other_kinds_are_refused(model, message):
    with pytest.raises(UnsupportedModelError, match=message):
        of_backend(Backend(**model))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"IQ== 0\nIg== 1\n",  # a tiktoken vocabulary
        b"\x0a\x05ab",  # longer than the file
        b"\x0b\x00",  # a wire type that no longer exists
        b"\x80\x80\x80",  # a number without an end
        b"\x08\x01",  # pieces that are numbers
        sentencepiece_model(TEXT, "bpe", 60)[:-3],
    ],
)
def test_other_files_are_refused(data):
    with pytest.raises((ValueError, TypeError, LookupError)):
        read_model(data)
