"""Windows, perplexity and bits against one window at a time (tests/reference/losses.py)."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest

from prunecli.errors import DataError
from prunecli.evaluation.tasks import perplexity
from prunecli.modules.loading import load_model
from prunecli.running.examples import IGNORED
from prunecli.running.losses import example_losses
from prunecli.running.runner import InMemory
from prunecli.running.windows import mlm_examples
from prunecli.text.tokens import load_tokenizer
from tests.evaluation.losses import lm_losses, mlm_losses
from tests.families import tiny_family
from tests.reference.losses import causal_nll

LINES = ("the hat on a hen", "no", "then ten of the hats " * 9)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    path = tiny_family(tmp_path_factory.mktemp("lm"), "gpt2")
    return InMemory(load_model(path, device="cpu")), load_tokenizer(path)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    path = tiny_family(tmp_path_factory.mktemp("mlm"), "bert")
    return InMemory(load_model(path, device="cpu")), load_tokenizer(path)


def recording(steps):
    """A progress whose steps are kept."""

    @contextmanager
    def progress(*_line):
        yield steps.append

    return progress


def test_progress_counts_the_tokens_that_are_read(masked):
    """Not the hidden ones alone, of which there are a few."""
    runner, tokenizer = masked
    steps = []
    mlm_losses(runner, tokenizer, LINES, 1000, progress=recording(steps))
    lengths = [min(64, len(tokenizer(line, verbose=False)["input_ids"])) for line in LINES]
    assert sum(steps) == sum(lengths)


@pytest.mark.parametrize("stride", [None, 10, 63])
def test_losses_are_those_of_single_windows(causal, stride):
    runner, tokenizer = causal
    steps = []
    found = lm_losses(runner, tokenizer, LINES, 100, stride=stride, progress=recording(steps))
    expected, tokens = [], []
    for line in LINES:
        ids = [2, *tokenizer(line, verbose=False)["input_ids"]]
        nats, done = 0.0, 1
        for begin in range(0, len(ids), stride or 63):
            window = ids[begin : begin + 64]
            new = begin + len(window) - done
            if new > 0:
                nats, done = nats + causal_nll(runner.model, window, new), done + new
        expected.append(nats)
        tokens.append(len(ids) - 1)
    assert found.nats.tolist() == pytest.approx(expected, rel=1e-5)
    assert found.tokens.tolist() == tokens
    assert tokens[2] > 64, "one text is longer than the context"
    if stride is None:
        later = 1  # windows overlap by the token from which the first new one is predicted
        assert sum(steps) == sum(tokens) + len(LINES) + later
    assert perplexity(found.loss) == pytest.approx(math.exp(sum(expected) / sum(tokens)), rel=1e-5)


def test_masked_losses_are_those_of_the_objective(masked):
    runner, tokenizer = masked
    found = mlm_losses(runner, tokenizer, LINES, 1000, seed=5)
    for batch in mlm_examples(tokenizer, runner.model, LINES, seed=5).batches(1):
        (index,) = batch.indices
        assert found.tokens[index] == int((batch.labels != IGNORED).sum())
        mean = example_losses(runner.model, batch).item()
        assert found.nats[index] / found.tokens[index] == pytest.approx(mean, rel=1e-5)


def test_perplexity_stays_a_number():
    assert perplexity(0) == 1
    assert math.isfinite(perplexity(1e6))


def test_a_damaged_model_is_refused(tmp_path):
    path = tiny_family(tmp_path / "lm", "gpt2")
    runner, tokenizer = InMemory(load_model(path, device="cpu")), load_tokenizer(path)
    runner.model.get_input_embeddings().weight.data[:] = math.nan
    with pytest.raises(DataError, match="not a finite number"):
        lm_losses(runner, tokenizer, LINES, 100)
