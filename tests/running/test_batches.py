"""Losses of batches against one example at a time (tests/reference/losses.py)."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.modules.pooling import Pooling
from prunecli.running.batches import batch_vectors, example_losses
from prunecli.running.encoding import (
    labelled_examples,
    lm_windows,
    mlm_examples,
    padding_id,
    require_task,
    translation_examples,
    window_examples,
)
from prunecli.running.examples import IGNORED, Batch
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import read_labelled
from prunecli.text.tokens import encode, load_tokenizer
from tests.families import tiny, tiny_family
from tests.opening import load
from tests.reference.losses import causal_nll, logits_of, masked_loss, nll, translation_loss

TEXT = ParallelText(
    "t",
    {
        "eng_Latn": ("the hat", "no", "then a thing of one or ten", "a", ""),
        "fra_Latn": ("le chapeau", "non non non non non non", "il y a", "oui", ""),
    },
)
PAIR = ("eng_Latn", "fra_Latn")
LINES = TEXT.sentences["eng_Latn"][:4]


@pytest.fixture(scope="module")
def made(shared_path):
    """(family, class or None) -> (model, tokenizer), each loaded once."""

    @cache
    def make(family, cls=None, **changes):
        if cls is not None:
            changes["architectures"] = [cls]
        path = tiny_family(shared_path / f"{family}-{cls}-{changes}", family, **changes)
        return load(path), load_tokenizer(path)

    return make


def _losses(model, batches):
    found = {}
    with torch.no_grad():
        for batch in batches:
            found |= dict(zip(batch.indices, example_losses(model, batch).tolist(), strict=True))
    return found


def _the_same_however_batched(model, make):
    """One batch, batches of one, and something between give the same losses; returns them."""
    whole = make(10_000)
    assert len(whole) == 1
    found = _losses(model, whole)
    for batch_tokens in (1, 40):
        batches = make(batch_tokens)
        assert len(batches) > 1
        assert _losses(model, batches) == pytest.approx(found, abs=1e-5)
    return found


@pytest.mark.parametrize("family", ["nllb-moe", "m2m_100", "t5"])
def test_translation(made, family):
    model, tokenizer = made(family)
    found = _the_same_however_batched(model, translation_examples(tokenizer, model, TEXT, [PAIR]).batches)
    sources = encode(tokenizer, TEXT.sentences["eng_Latn"], "eng_Latn")
    targets = encode(tokenizer, TEXT.sentences["fra_Latn"], "fra_Latn", as_target=True)
    expected = {
        index: translation_loss(model, source, target)
        for index, (source, target) in enumerate(zip(sources, targets, strict=True))
    }
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("family", "prefix"), [("gpt2", [2]), ("llama", [])])
def test_causal_language_model(made, family, prefix):
    model, tokenizer = made(family)
    examples = window_examples(lm_windows(tokenizer, model, LINES), padding_id(model, tokenizer))
    found = _the_same_however_batched(model, examples.batches)
    for index, line in enumerate(LINES):
        ids = prefix + tokenizer(line)["input_ids"]
        assert found[index] == pytest.approx(causal_nll(model, ids, len(ids) - 1) / (len(ids) - 1), abs=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_masked_language_model(made, family):
    model, tokenizer = made(family)
    found = _the_same_however_batched(model, mlm_examples(tokenizer, model, LINES, seed=3).batches)
    for batch in mlm_examples(tokenizer, model, LINES, seed=3).batches(1):
        hidden, labels = batch.inputs["input_ids"][0].tolist(), batch.labels[0].tolist()
        assert found[batch.indices[0]] == pytest.approx(masked_loss(model, hidden, labels), abs=1e-5)


CLASSES = "LABEL_0\tthe hat\n1\tthen a thing of one\nlabel_2\tno\n"
PAIRS = "LABEL_0\tthe hat\ta hat of ten\n1\tthen a thing of one\tno\n"
CLASSIFIERS = {"bert": "Bert", "roberta": "Roberta", "gpt2": "GPT2", "llama": "Llama", "bart": "Bart"}


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("lines", [CLASSES, PAIRS])
def test_classification(made, family, lines):
    model, tokenizer = made(family, f"{CLASSIFIERS[family]}ForSequenceClassification", num_labels=3)
    Path("text.tsv").write_text(lines)
    text = read_labelled(Path("text.tsv"))

    make = labelled_examples(tokenizer, model, text).batches
    found = _losses(model, make(10_000))
    assert _losses(model, make(1)) == pytest.approx(found, abs=1e-5)
    for index, label in enumerate((0, 1, 2)[: len(text)]):
        second = None if text.seconds is None else text.seconds[index]
        ids = tokenizer(text.texts[index], second)["input_ids"]
        assert found[index] == pytest.approx(nll(logits_of(model, input_ids=ids), label), abs=1e-5)


@pytest.mark.parametrize(
    ("family", "task", "can"),
    [
        ("bert", "classification", "mlm, embedding"),
        ("gpt2", "translation", "lm, embedding"),
        ("t5", "lm", "translation"),
        ("t5", "embedding", "translation"),
        ("llama", "mlm", "lm, embedding"),
    ],
)
def test_a_model_without_the_head(made, family, task, can):
    model, _ = made(family)
    for able in can.split(", "):
        require_task(model, able)
    with pytest.raises(UnsupportedModelError, match=rf"{task}.*\nIt can do: {can}\.$"):
        require_task(model, task)


def test_a_regression_head_is_refused(made):
    model, _ = made("bert", "BertForSequenceClassification", num_labels=1)
    with pytest.raises(UnsupportedModelError, match="one of several classes"):
        require_task(model, "classification")


def test_padding_where_model_and_tokenizer_have_none():
    text = SimpleNamespace(pad_token_id=-1)
    config = SimpleNamespace(get_text_config=lambda: text)
    tokenizer = SimpleNamespace(pad_token_id=None, eos_token_id=7)
    assert padding_id(SimpleNamespace(config=config), tokenizer) == 7
    tokenizer = SimpleNamespace(pad_token_id=None, eos_token_id=None)
    assert padding_id(SimpleNamespace(config=config), tokenizer) == 0


def test_a_class_that_hands_all_arguments_on_caches_nothing():
    model = tiny.build("bart", head="causal")
    batch = Batch({"input_ids": torch.tensor([[5, 6]])}, torch.tensor([[5, 6]]), (0,))
    assert batch.arguments(model.base_model)["use_cache"] is False


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("llama4_text", "does not run without its head"), ("perceiver", "takes inputs in the place of tokens")],
)
def test_a_class_that_does_not_run_without_its_head_makes_no_vectors(model_type, reason):
    batch = Batch({"input_ids": torch.tensor([[5, 6]])}, torch.tensor([0]), (0,))
    with pytest.raises(UnsupportedModelError, match=reason):
        batch_vectors(tiny.build(model_type), Pooling(), batch)


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
    config = SimpleNamespace(model_type="", max_position_embeddings=context, is_encoder_decoder=False)
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
