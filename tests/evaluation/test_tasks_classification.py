from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import DataError
from prunecli.evaluation.tasks import classify, f1_scores, matthews_correlation
from prunecli.modules.loading import load_model
from prunecli.running.runner import InMemory
from prunecli.text.plain import read_labelled
from prunecli.text.tokens import load_tokenizer
from tests.families import tiny_family
from tests.reference.classification import matthews, matthews_binary
from tests.reference.losses import logits_of, nll

LINE = ("classifying", 5, "examples")
LINES = ("0\tthe hat\n", "LABEL_1\ta thing of one\n", "2\tno\n", "2\tthen ten hens\n", "1\ton\n")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    path = tiny_family(
        tmp_path_factory.mktemp("c"), "bert", architectures=["BertForSequenceClassification"], num_labels=3
    )
    return InMemory(load_model(path, device="cpu")), load_tokenizer(path)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.tsv").write_text("".join(LINES))
    return read_labelled(tmp_path / "text.tsv")


@pytest.mark.parametrize("batch_tokens", [1, 20, 1000])
def test_choices_are_those_of_single_examples(classifier, text, batch_tokens):
    runner, tokenizer = classifier
    steps = []

    @contextmanager
    def progress(*line):
        assert line == LINE
        yield steps.append

    chosen, labels, losses = classify(runner, tokenizer, text, batch_tokens, LINE, progress)
    assert sum(steps) == len(text)
    assert labels.tolist() == [0, 1, 2, 2, 1]
    for index, sentence in enumerate(text.texts):
        logits = logits_of(runner.model, input_ids=tokenizer(sentence)["input_ids"])
        assert chosen[index] == int(np.argmax(logits))
        assert losses[index] == pytest.approx(nll(logits, int(labels[index])), abs=1e-5)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_matthews_correlation_against_its_definition(pairs):
    chosen, labels = zip(*pairs, strict=True)
    found = matthews_correlation(np.array(chosen), np.array(labels))
    assert found == pytest.approx(matthews(labels, chosen), abs=1e-9)
    two = [[value % 2 for value in values] for values in (chosen, labels)]
    assert matthews_correlation(*map(np.array, two)) == pytest.approx(
        matthews_binary(two[1], two[0]), abs=1e-9
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_f1_is_the_harmonic_mean_of_precision_and_recall(pairs):
    chosen, labels = zip(*pairs, strict=True)
    found = f1_scores(np.array(chosen), np.array(labels))
    assert set(found) == {*chosen, *labels}
    for number, value in found.items():
        both = sum(a == b == number for a, b in pairs)
        precision = both / max(1, chosen.count(number))
        recall = both / max(1, labels.count(number))
        expected = 0.0 if both == 0 else 2 * precision * recall / (precision + recall)
        assert value == pytest.approx(expected)


def test_unknown_labels_are_refused(classifier, tmp_path):
    runner, tokenizer = classifier
    (tmp_path / "bad.tsv").write_text("0\ta\nsurprise\tb\n")
    with pytest.raises(DataError, match="line 2: the model knows no label 'surprise'"):
        classify(runner, tokenizer, read_labelled(tmp_path / "bad.tsv"), 100, LINE)
