"""Windows, perplexity and bits against one window at a time (tests/reference/losses.py)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import DataError, UnsupportedModelError, UsageError
from prunecli.evaluation.language_model import (
    TextLosses,
    bits_per,
    lm_losses,
    mlm_losses,
    perplexity,
    utf8_bytes,
)
from prunecli.evaluation.objective import IGNORED, example_losses, mlm_batches
from prunecli.evaluation.windows import lm_windows, window_batches
from prunecli.modules.loading import load_model
from prunecli.text.tokens import load_tokenizer
from tests.families import tiny_family
from tests.reference.losses import causal_nll

LINES = ("the hat on a hen", "no", "then ten of the hats " * 9)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    path = tiny_family(tmp_path_factory.mktemp("lm"), "gpt2")
    return load_model(path, device="cpu"), load_tokenizer(path)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    path = tiny_family(tmp_path_factory.mktemp("mlm"), "bert")
    return load_model(path, device="cpu"), load_tokenizer(path)


class _Words:
    """A tokenizer whose tokens are a text's numbers."""

    model_max_length = 10**30
    eos_token_id = None
    pad_token_id = None

    def __init__(self, start=None):
        self.bos_token_id = start

    def __call__(self, texts, **_options):
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def _model(context):
    config = SimpleNamespace(max_position_embeddings=context, is_encoder_decoder=False)
    return SimpleNamespace(config=config, can_generate=lambda: True)


@given(st.data())
def test_every_token_is_predicted_once_from_enough_context(data):
    context = data.draw(st.integers(2, 12), label="context")
    stride = data.draw(st.none() | st.integers(1, context - 1), label="stride")
    lengths = data.draw(st.lists(st.integers(2, 40), min_size=1, max_size=4), label="lengths")
    # Each token is its own place: 100 for the text, and its number in it.
    texts = [" ".join(str(100 * number + place) for place in range(n)) for number, n in enumerate(lengths)]
    windows = lm_windows(_Words(), _model(context), texts, stride=stride)
    step = stride or context - 1
    seen = []
    for batch in window_batches(windows, 0, data.draw(st.integers(1, 60), label="batch tokens")):
        for row, index in enumerate(batch.indices):
            ids = batch.inputs["input_ids"][row][batch.inputs["attention_mask"][row] == 1].tolist()
            labels = batch.labels[row].tolist()
            assert len(ids) <= context
            assert ids == list(range(ids[0], ids[0] + len(ids))), "a window is one stretch of one text"
            assert {token // 100 for token in ids} == {windows[index].text}
            for place, label in enumerate(labels):
                if label != IGNORED:
                    assert label == ids[place]
                    assert place >= 1
                    assert place >= min(context - step, label % 100)
                    seen.append(label)
    assert sorted(seen) == [100 * number + place for number, n in enumerate(lengths) for place in range(1, n)]


def test_the_first_token_is_predicted_from_a_start_token():
    (window,) = lm_windows(_Words(start=7), _model(8), ["1 2 3"])
    assert (window.ids, window.counted) == ((7, 1, 2, 3), 3)
    (window,) = lm_windows(_Words(start=7), _model(8), ["7 1 2 3"])
    assert (window.ids, window.counted) == ((7, 1, 2, 3), 3)
    (window,) = lm_windows(_Words(), _model(None), ["1 2 3"])
    assert (window.ids, window.counted) == ((1, 2, 3), 2)


def test_texts_without_a_token_to_predict_are_left_out():
    (window,) = lm_windows(_Words(), _model(8), ["1", "4 5"])
    assert window.text == 1
    with pytest.raises(DataError, match="no token to predict"):
        lm_windows(_Words(), _model(8), ["1", "2"])


@pytest.mark.parametrize("stride", [0, 8, 9, -1])
def test_windows_must_overlap(stride):
    with pytest.raises(UsageError, match="a window has 8 tokens"):
        lm_windows(_Words(), _model(8), ["1 2 3"], stride=stride)


def test_a_window_is_no_longer_than_its_default():
    text = " ".join(map(str, range(5000)))
    for positions in (None, 1 << 17):
        windows = lm_windows(_Words(), _model(positions), [text])
        assert [len(window.ids) for window in windows] == [2048, 2048, 906]
        assert [window.ids[0] for window in windows] == [0, 2047, 4094], "the last token of the window before"
    assert max(len(window.ids) for window in lm_windows(_Words(), _model(100), [text])) == 100


def test_a_context_that_is_asked_for():
    text = " ".join(map(str, range(5000)))
    (window,) = lm_windows(_Words(), _model(5000), [text], context=5000)
    assert window.counted == 4999
    tokenizer = _Words()
    tokenizer.model_max_length = 10  # the tokenizer's word is a default
    assert len(lm_windows(tokenizer, _model(5000), [text], context=20)[0].ids) == 20
    assert len(lm_windows(tokenizer, _model(5000), [text])[0].ids) == 10
    with pytest.raises(UsageError, match="--context 5,001: the model has 5,000 positions"):
        lm_windows(_Words(), _model(5000), [text], context=5001)


def test_masked_texts_are_cut_to_the_context(masked):
    model, tokenizer = masked
    seen = [
        {
            len(row)
            for batch in mlm_batches(tokenizer, model, LINES, 1, context=context)
            for row in batch.labels
        }
        for context in (None, 9)
    ]
    assert max(seen[0]) == 64
    assert max(seen[1]) == 9
    with pytest.raises(UsageError, match="--context 67: the model has 66 positions"):
        mlm_batches(tokenizer, model, LINES, 1, context=67)


@pytest.mark.parametrize("context", [2, 7, 64])
def test_windows_of_a_context_lose_only_what_is_before_them(causal, context):
    """Each token from those before it in its window, whose first is the last of the window before."""
    model, tokenizer = causal
    found = lm_losses(model, tokenizer, LINES, 100, context=context)
    for line, nats in zip(LINES, found.nats, strict=True):
        ids = [2, *tokenizer(line, verbose=False)["input_ids"]]
        expected = 0.0
        for start in range(0, len(ids) - 1, context - 1):
            window = ids[start : start + context]
            expected += causal_nll(model, window, len(window) - 1)
        assert nats == pytest.approx(expected, rel=1e-5)


def test_progress_counts_the_tokens_that_are_read(masked):
    """Not the hidden ones alone, of which there are a few."""
    model, tokenizer = masked
    steps = []
    mlm_losses(model, tokenizer, LINES, 1000, advance=steps.append)
    lengths = [min(64, len(tokenizer(line, verbose=False)["input_ids"])) for line in LINES]
    assert sum(steps) == sum(lengths)


@pytest.mark.parametrize("stride", [None, 10, 63])
def test_losses_are_those_of_single_windows(causal, stride):
    model, tokenizer = causal
    steps = []
    found = lm_losses(model, tokenizer, LINES, 100, stride=stride, advance=steps.append)
    expected, tokens = [], []
    for line in LINES:
        ids = [2, *tokenizer(line, verbose=False)["input_ids"]]
        nats, done = 0.0, 1
        for begin in range(0, len(ids), stride or 63):
            window = ids[begin : begin + 64]
            new = begin + len(window) - done
            if new > 0:
                nats, done = nats + causal_nll(model, window, new), done + new
        expected.append(nats)
        tokens.append(len(ids) - 1)
    assert found.nats.tolist() == pytest.approx(expected, rel=1e-5)
    assert found.tokens.tolist() == tokens
    assert tokens[2] > 64, "one text is longer than the context"
    if stride is None:
        later = 1  # windows overlap by the token from which the first new one is predicted
        assert sum(steps) == sum(tokens) + len(LINES) + later
    assert perplexity(found.loss) == pytest.approx(math.exp(sum(expected) / sum(tokens)), rel=1e-5)


def test_batches_do_not_change_losses(causal, masked):
    for measure, (model, tokenizer) in ((lm_losses, causal), (mlm_losses, masked)):
        one, many = (measure(model, tokenizer, LINES, size) for size in (1, 1000))
        assert one.nats.tolist() == pytest.approx(many.nats.tolist(), rel=1e-5)
        assert one.tokens.tolist() == many.tokens.tolist()


def test_masked_losses_are_those_of_the_objective(masked):
    model, tokenizer = masked
    found = mlm_losses(model, tokenizer, LINES, 1000, seed=5)
    for batch in mlm_batches(tokenizer, model, LINES, 1, seed=5):
        (index,) = batch.indices
        assert found.tokens[index] == int((batch.labels != IGNORED).sum())
        mean = example_losses(model, batch, "mlm").item()
        assert found.nats[index] / found.tokens[index] == pytest.approx(mean, rel=1e-5)


def test_bits_by_hand():
    losses = TextLosses(np.array([8 * math.log(2), 0.0, 2 * math.log(2)]), np.array([3, 0, 1]))
    texts = ("né", "left out", "à")
    assert losses.loss == pytest.approx(10 * math.log(2) / 4)
    assert bits_per(losses, texts, utf8_bytes) == pytest.approx(10 / 5)
    assert bits_per(losses, texts, len) == pytest.approx(10 / 3)


def test_perplexity_stays_a_number():
    assert perplexity(0) == 1
    assert math.isfinite(perplexity(1e6))


def test_a_damaged_model_is_refused(tmp_path):
    path = tiny_family(tmp_path / "lm", "gpt2")
    model, tokenizer = load_model(path, device="cpu"), load_tokenizer(path)
    model.get_input_embeddings().weight.data[:] = math.nan
    with pytest.raises(DataError, match="not a finite number"):
        lm_losses(model, tokenizer, LINES, 100)


def test_the_wrong_kind_of_model_is_refused(causal, masked):
    with pytest.raises(UnsupportedModelError, match="lm: the model is a BertForMaskedLM"):
        lm_losses(*masked, LINES, 100)
    with pytest.raises(UnsupportedModelError, match="mlm: the model is a GPT2LMHeadModel"):
        mlm_losses(*causal, LINES, 100)
