from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import UsageError
from prunecli.running.encoding import lm_windows, window_examples
from prunecli.running.examples import IGNORED


class _Words:
    """A tokenizer whose tokens are a text's numbers."""

    name_or_path = "words"
    model_max_length = 10**30
    eos_token_id = None
    pad_token_id = None
    unk_token_id = None

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
    for batch in window_examples(windows, 0).batches(data.draw(st.integers(1, 60), label="batch tokens")):
        for row, index in enumerate(batch.indices):
            ids = batch.inputs["input_ids"][row][batch.inputs["attention_mask"][row] == 1].tolist()
            labels = batch.labels[row].tolist()
            assert len(ids) <= context
            assert ids == list(range(ids[0], ids[0] + len(ids))), "a window is one stretch of one text"
            assert {token // 100 for token in ids} == {windows[index].text}
            for place, label in enumerate(labels, start=1):
                if label != IGNORED:
                    assert label == ids[place], "the logits before a token predict it"
                    assert place >= min(context - step, label % 100)
                    seen.append(label)
    assert sorted(seen) == [100 * number + place for number, n in enumerate(lengths) for place in range(1, n)]


@pytest.mark.parametrize("stride", [0, 8, 9, -1])
def test_windows_must_overlap(stride):
    with pytest.raises(UsageError, match="a window has 8 tokens"):
        lm_windows(_Words(), _model(8), ["1 2 3"], stride=stride)


def test_a_context_that_is_asked_for():
    text = " ".join(map(str, range(5000)))
    (window,) = lm_windows(_Words(), _model(5000), [text], context=5000)
    assert window.counted == 4999
    tokenizer = _Words()
    tokenizer.model_max_length = 10  # the tokenizer's word is a default
    assert len(lm_windows(tokenizer, _model(5000), [text], context=20)[0].ids) == 20
    assert len(lm_windows(tokenizer, _model(5000), [text])[0].ids) == 10
    with pytest.raises(UsageError, match="context=5001`: the model has 5,000 positions"):
        lm_windows(_Words(), _model(5000), [text], context=5001)
