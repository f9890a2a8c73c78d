"""A file of the teacher's logits teaches what the teacher does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from prunecli import Destination, ShrinkOptions, TextChoice, TrainingOptions, finetune, shrink
from prunecli.errors import DataError, OutputError, UsageError
from prunecli.modules.loading import load_model
from prunecli.training import finetune as finetuning
from prunecli.training.loss import KEPT, TOKENS, distillation, whole_logits
from prunecli.training.options import LossOptions
from tests.families import tiny_family
from tests.reference.training_loss import divergence, softmax
from tests.training.runs import text_file


@settings(max_examples=25)
@given(st.integers(0, 99), st.integers(1, 3), st.integers(2, 9), st.data(), st.floats(0.5, 4.0))
def test_the_other_tokens_share_what_is_left(seed, positions, vocabulary, data, temperature):
    """The likeliest tokens keep their probability; the divergence is that of the distribution so made."""
    count = data.draw(st.integers(1, vocabulary))
    generator = torch.Generator().manual_seed(seed)
    own, taught = 2 * torch.randn(2, positions, vocabulary, generator=generator)
    values, tokens = taught.log_softmax(-1).topk(count)
    made = whole_logits(values, tokens, vocabulary)
    expected = 0.0
    for row in range(positions):
        shares = softmax(taught[row].tolist())
        kept = set(tokens[row].tolist())
        rest = max(1 - sum(shares[token] for token in kept), 1e-7) / max(vocabulary - count, 1)
        filled = [math.log(share if token in kept else rest) for token, share in enumerate(shares)]
        assert made[row].tolist() == pytest.approx(filled, abs=1e-2)
        expected += divergence(own[row].tolist(), filled, temperature)
    assert float(distillation(own, made, temperature)) == pytest.approx(expected, rel=1e-2, abs=1e-3)


@pytest.fixture
def models(tmp_path):
    """Student and teacher."""
    return [
        tiny_family(tmp_path / name, "llama", seed=seed) for name, seed in (("student", 0), ("teacher", 1))
    ]


def taught(models, tmp_path, output, *, text=None, hidden=0.0, task=None, **changes):
    student, teacher = models
    loss = LossOptions(label_smoothing=0.0, distill=0.9, temperature=2.0, hidden=hidden)
    values = {"teacher": teacher, "steps": 4, "warmup": 1, "batch_tokens": 64, "loss": loss, "device": "cpu"}
    choice = TextChoice(files=(text or text_file(tmp_path / "text.txt"),))
    options = TrainingOptions(**{**values, **changes})
    finetune(student, choice, Destination(tmp_path / output), options, task=task)
    return dict(load_model(tmp_path / output, device="cpu", dtype="float32").named_parameters())


def test_it_teaches_what_the_teacher_does(models, tmp_path, monkeypatch):
    """The tiny model has fewer tokens than are kept: the weights are equal but for the file's 16 bits."""
    want = taught(models, tmp_path, "with-teacher")
    alone = taught(models, tmp_path, "without", teacher=None, loss=LossOptions(label_smoothing=0.0))
    path = tmp_path / "logits.safetensors"
    found = taught(models, tmp_path, "with-logits", teacher_logits=path)
    assert load_file(path)[TOKENS].shape[1] <= KEPT

    def loaded(*_arguments):
        raise AssertionError("the teacher is loaded")

    monkeypatch.setattr(finetuning, "load_teacher", loaded)
    again = taught(models, tmp_path, "again", teacher_logits=path)
    for name, weight in want.items():
        moved = (weight - alone[name]).abs().max()
        assert (found[name] - weight).abs().max() <= 0.05 * moved, name
        assert torch.equal(found[name], again[name])


def test_what_a_file_does_not_serve(models, tmp_path):
    path = tmp_path / "logits.safetensors"
    with pytest.raises(UsageError, match="`hidden_weight`"):
        taught(models, tmp_path, "out", teacher_logits=path, hidden=0.5)
    with pytest.raises(UsageError, match="needs a `teacher`"):
        taught(models, tmp_path, "out", teacher_logits=path, teacher=None)
    with pytest.raises(UsageError, match="`task=mlm`"):
        taught(models, tmp_path, "out", teacher_logits=path, task="mlm")
    with pytest.raises(OutputError, match="nowhere"):
        taught(models, tmp_path, "out", teacher_logits=tmp_path / "nowhere" / "logits.safetensors")
    model, text = models[0], TextChoice(files=(tmp_path / "text.txt",))
    options = {"device": "cpu", "teacher_logits": tmp_path / "nowhere" / "logits.safetensors"}
    with pytest.raises(UsageError, match="goes with `heal`"):
        shrink(model, text, ShrinkOptions(**options))
    with pytest.raises(OutputError, match="nowhere"):  # before anything is measured
        shrink(model, text, ShrinkOptions(**options, heal_steps=1))
    path.write_bytes(b"none")
    with pytest.raises(DataError, match="holds no teacher's logits"):
        taught(models, tmp_path, "out", teacher_logits=path)
    path.unlink()
    taught(models, tmp_path, "out", teacher_logits=path)
    other = text_file(tmp_path / "other.txt", count=30)
    with pytest.raises(DataError, match="for another text"):
        taught(models, tmp_path, "other", teacher_logits=path, text=other)
