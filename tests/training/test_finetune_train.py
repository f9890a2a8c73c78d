import math
import os
import signal
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from torch.nn import functional

from prunecli.errors import CheckpointError, OutputError, UsageError
from prunecli.model.checkpoint import open_model
from prunecli.running.encoding import translation_examples
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import PlainText
from prunecli.text.tokens import load_tokenizer
from prunecli.training.data import TrainingData
from prunecli.training.options import LossOptions
from prunecli.training.trainer import TrainingError
from tests.families import tiny_family
from tests.opening import load
from tests.reference.losses import logits_of, nll
from tests.tiny import change_json, json_of, tiny_nllb_moe
from tests.training.runs import (
    CALM,
    PAIRS,
    changed,
    kept_steps,
    language_model,
    options,
    signalled,
    staged,
    train,
    translation,
)


@pytest.fixture
def model():
    """With dropout, so that a resumed run needs the random numbers of the whole one."""
    return tiny_family("model", "m2m_100", dropout=0.2)


def test_the_loss_falls_and_the_best_model_is_staged(model):
    trained = train(model, "state", options(steps=40, eval_every=10, learning_rate=5e-3))
    losses = [row["loss"] for row in trained.log["validation"]]
    assert len(losses) == 5
    assert losses[-1] < losses[1] - 0.3 < losses[0]
    assert trained.log["best"] == {"step": 10 * int(np.argmin(losses)), "loss": min(losses)}
    made = open_model(trained.staged)
    source = open_model(model)
    assert dict(made.tensors) == dict(source.tensors)
    assert made.fingerprint != source.fingerprint


def test_what_is_worse_than_the_start_is_not_called_the_best(model):
    said = []
    train(model, "state", options(steps=2, eval_every=1, warmup=1, learning_rate=1.0), report=said.append)
    steps = [line for line in said if line.startswith(("step 1", "step 2"))]
    assert len(steps) == 2
    assert all("(no better than the start)" in line for line in steps)


def test_the_schedule_is_the_inverse_square_root(model):
    trained = train(model, "state", options(steps=9, eval_every=1, learning_rate=3e-4, warmup=4))
    rates = [row["learning_rate"] for row in trained.log["training"]]
    # The Trainer's rate of update n, counted from 0: n / warmup, then sqrt(warmup / n), times the highest.
    expected = [3e-4 * (n / 4 if n < 4 else math.sqrt(4 / n)) for n in range(9)]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_accumulated_batches_are_one_batch():
    """Four sources of one length, references of 1 to 4 words: two batches have other numbers of tokens."""
    model = tiny_family("model", "m2m_100", **CALM)
    english = ("the the the the the",) * 4
    french = ("the", "the the", "the the the", "the the the the")
    text = ParallelText("t", {"eng_Latn": english, "fra_Latn": french})
    data = TrainingData("translation", text, None, PAIRS[:1])
    examples = translation_examples(load_tokenizer(model), load(model), text, PAIRS[:1])
    longest = max(max(lengths) for lengths in examples.lengths)
    assert {max(lengths) for lengths in examples.lengths} == {longest}
    assert len({target for _, target in examples.lengths}) == 4
    made = options(steps=3, eval_every=1, learning_rate=1e-2)
    whole = train(model, "a", made.updated(batch_tokens=4 * longest), data)
    parts = train(model, "b", made.updated(batch_tokens=2 * longest, accumulate=2), data)
    assert whole.log["tokens"] == parts.log["tokens"] == 3 * sum(target for _, target in examples.lengths)
    one, other = ([row["loss"] for row in log["training"]] for log in (whole.log, parts.log))
    assert other == pytest.approx(one, rel=1e-4)
    assert one[2] < one[0] - 0.1


def test_a_stop_between_two_validations_keeps_that_step(model, monkeypatch):
    whole = train(model, "whole", options(steps=8, eval_every=4, accumulate=2))
    with signalled(monkeypatch, signal.SIGTERM), pytest.raises(KeyboardInterrupt):
        train(model, "parts", options(steps=8, eval_every=4, accumulate=2))
    assert kept_steps("parts") == [3]
    said = []
    again = train(model, "parts", options(steps=8, eval_every=4, accumulate=2), report=said.append)
    assert any(line.startswith("Resuming from step 3") for line in said)
    assert staged(again) == staged(whole)
    for figure in ("validation", "tokens"):
        assert again.log[figure] == whole.log[figure]
    third, fourth, *rest = again.log["training"]  # the losses up to the stop are a point of their own
    first, *others = whole.log["training"]
    assert (third["step"], fourth["step"], rest) == (3, 4, others)
    assert (3 * third["loss"] + fourth["loss"]) / 4 == pytest.approx(first["loss"], abs=1e-6)


def test_a_killed_run_goes_on_from_the_last_whole_checkpoint(model):
    whole = train(model, "whole", options(steps=6))

    def die(line):
        if line.startswith("step 4"):  # validated, not yet kept
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train(model, "parts", options(steps=6), report=die)
    assert kept_steps("parts") == [2]
    half = Path("parts/checkpoint-4")  # what a kill in the middle of writing leaves
    half.mkdir()
    (half / "trainer_state.json").write_text('{"global_step": 4, "epo')
    assert staged(train(model, "parts", options(steps=6))) == staged(whole)


def test_a_finished_run_is_not_trained_again_but_goes_further(model):
    first = train(model, "state", options(steps=4))
    said = []
    again = train(model, "state", options(steps=4), report=said.append)
    assert said[-1] == "The training had ended before; writing its result."
    assert again.log == first.log
    assert staged(train(model, "state", options(steps=3))) == staged(first)
    assert staged(train(model, "state", options(steps=6))) == staged(train(model, "whole", options(steps=6)))


@pytest.mark.parametrize("part", ["all", "embeddings"])
def test_the_state_of_another_run_is_refused_or_thrown_away(part, model):
    given = partial(options, steps=2, train=part)
    train(model, "state", given())
    with pytest.raises(UsageError, match=r"learning_rate was 0\.001, now it is 0\.5\n.*`resume=never`"):
        train(model, "state", given(learning_rate=0.5))
    with pytest.raises(UsageError, match=r"the training text changed \("):
        train(model, "state", given(), translation(41))
    anew = train(model, "state", given(learning_rate=1e-2), resume=False)
    assert staged(anew) == staged(train(model, "b", given(learning_rate=1e-2)))


@pytest.mark.parametrize(("spoilt", "said"), [(math.nan, "not a finite number"), (1e17, "far too large")])
def test_a_loss_that_is_no_number_stops_the_run(model, spoilt, said):
    good = options(steps=8, eval_every=4)
    train(model, "good", options(steps=4, eval_every=4))

    true, calls = functional.cross_entropy, []

    def spoil(logits, labels, **how):
        calls.extend([1] if how["label_smoothing"] else [])  # none of the validations
        return true(logits, labels, **how) * (spoilt if len(calls) > 5 and how["label_smoothing"] else 1.0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(functional, "cross_entropy", spoil)
        with pytest.raises(TrainingError, match=rf"{said}.*\n.*`learning_rate`"):
            train(model, "state", good)
    assert kept_steps("state") == [4]
    kept = [Path(f"{state}/checkpoint-4/model.safetensors").read_bytes() for state in ("state", "good")]
    assert kept[0] == kept[1]


def test_patience(model):
    """With a rate of 0 no validation is better than the first; an interrupted run counts on."""

    def stop(line):
        if line.startswith("step 4"):
            os.kill(os.getpid(), signal.SIGINT)

    made = options(steps=20, learning_rate=0.0, patience=2)
    with pytest.raises(KeyboardInterrupt):
        train(model, "state", made, report=stop)
    trained = train(model, "state", made)
    assert trained.log["steps"] == 6
    assert trained.log["best"]["step"] == 2
    assert train(model, "state", made).log == trained.log  # it had ended


def test_without_validation_the_last_model_is_the_result(model):
    trained = train(model, "state", options(steps=3), translation(valid=0))
    assert trained.log["best"] is None
    assert trained.log["validation"] == []
    assert trained.log["steps"] == 3


def test_chrf_chooses():
    model = tiny_family("model", "m2m_100", max_position_embeddings=32)  # at which searches end
    trained = train(model, "state", options(steps=4, metric="chrf++"), translation(valid=2))
    scores = [row["chrf++"] for row in trained.log["validation"]]
    assert trained.log["best"]["chrf++"] == max(scores[1:])
    assert all(0 <= score <= 100 for score in scores)


def test_weights_stay_in_float32():
    model = tiny_nllb_moe("moe", dtype="F16")
    moved = changed(model, train(model, "state", options(steps=2, dtype="bfloat16")))
    # Routers too; an expert stays as it was where no token chose it.
    assert all(".experts." in name for name in set(open_model(model).tensors) - moved)
    assert sum(".experts." in name for name in moved) > 20


def test_a_teacher_with_another_tokenizer_is_refused(model):
    other = tiny_family("other", "m2m_100")
    made = json_of(other / "tokenizer.json")["model"]
    a, b = made["vocab"]["a"], made["vocab"]["b"]
    change_json(other / "tokenizer.json", model={**made, "vocab": {**made["vocab"], "a": b, "b": a}})
    with pytest.raises(UsageError, match="another vocabulary: 2 tokens differ, such as 'a'"):
        train(model, "state", options(teacher=other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 80}, "a vocabulary of 80, the model one of"),
        ({"d_model": 16}, "16 wide, the model's 32"),
        ({"decoder_start_token_id": 0}, "decoder_start_token_id is 0"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(model, changes, message):
    other = tiny_family("other", "m2m_100", **changes)
    made = options(teacher=other, loss=LossOptions(distill=0.5, hidden=1.0))
    with pytest.raises(UsageError, match=message):
        train(model, "state", made)
    assert not Path("state").exists()


@pytest.mark.parametrize("documents", [True, False])
def test_a_language_models_validation_loss_is_its_perplexity(documents):
    """Documents follow one another in windows of 64 tokens; each line has windows of its own."""
    model = tiny_family("model", "gpt2")
    data = language_model()
    data = replace(data, valid=replace(data.valid, whole_files=documents))
    trained = train(model, "state", options(steps=1, learning_rate=0.0), data)
    lines = [[*ids, 2] for ids in load_tokenizer(model)(list(data.valid.texts))["input_ids"]]
    streams = [[2, *chain(*lines)]] if documents else [[2, *line] for line in lines]
    nats = []
    for stream in streams:
        for start in range(0, len(stream) - 1, 64):  # reads 64 tokens, and predicts those that follow each
            window = stream[start : start + 65]
            logits = logits_of(load(model), input_ids=window[:-1])
            nats += [nll(row, token) for row, token in zip(logits, window[1:], strict=True)]
    assert trained.log["validation"][0]["loss"] == pytest.approx(sum(nats) / len(nats), rel=1e-4)


@pytest.mark.parametrize(("family", "task"), [("bert", "mlm"), ("gpt2", "lm")])
def test_the_tokens_of_a_run_are_those_that_it_read(family, task):
    """All tokens count, not the hidden ones alone."""
    model = tiny_family("model", family)
    data = TrainingData(task, PlainText((), ("the hen no ten",) * 50))
    made = options(steps=None, epochs=1.0, batch_tokens=100)
    trained = train(model, "state", made, data)
    tokens = sum(map(len, load_tokenizer(model)(list(data.train.texts))["input_ids"]))
    # The stream of a causal model begins with <s> and has </s> behind each line, the last of which is not read.
    assert trained.log["tokens"] == (tokens if task == "mlm" else tokens + 50)


def test_time_ends_a_run(model):
    made = options(steps=None, minutes=1e-9, eval_every=50)
    trained = train(model, "state", made)
    assert trained.log["steps"] == 1
    assert [row["step"] for row in trained.log["validation"]] == [0, 1]
    assert train(model, "state", made).log == trained.log


def test_a_directory_of_something_else_is_left_alone(model):
    Path("state").mkdir()
    Path("state/thesis.tex").write_text("x")
    with pytest.raises(OutputError, match="holds no run"):
        train(model, "state")
    assert Path("state/thesis.tex").read_text() == "x"


CALLBACKS = {"stateful_callbacks": {"Watch": {"attributes": [1]}}}


@pytest.mark.parametrize(
    ("file", "damage", "error", "said"),
    [
        (
            "trainer_state.json",
            {"best_model_checkpoint": 0.5},
            CheckpointError,
            r"damaged \(TypeError: best_",
        ),
        ("trainer_state.json", {"best_global_step": "two"}, CheckpointError, r"damaged \(TypeError: best_"),
        ("trainer_state.json", CALLBACKS, CheckpointError, r"damaged \(AttributeError"),
        ("run.json", {"run": []}, UsageError, r"run\.json: damaged"),
        ("run.json", {"inputs": [1]}, UsageError, r"run\.json: damaged"),
    ],
)
def test_a_damaged_state_is_refused(model, file, damage, error, said):
    train(model, "state", options(steps=2))
    change_json(next(Path("state").rglob(file)), **damage)
    with pytest.raises(error, match=said):
        train(model, "state", options(steps=2))
