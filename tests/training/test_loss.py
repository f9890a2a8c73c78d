"""The objective equals its formula, token by token."""

import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from prunecli import Destination, ShrinkOptions, TextChoice, TrainingOptions, finetune, shrink
from prunecli.errors import DataError, OutputError, UsageError
from prunecli.training import data as training_data
from prunecli.training.loss import (
    KEPT,
    TOKENS,
    Objective,
    distillation,
    hidden_distance,
    whole_logits,
)
from prunecli.training.options import LossOptions
from tests.families import tiny, tiny_family
from tests.opening import load
from tests.reference.training_loss import divergence, smoothed, softmax, squared_distance
from tests.stock_mixtures import tiny_mixture
from tests.training.runs import text_file


def logits_and_labels(seed: int, batch: int, length: int, vocabulary: int):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, length, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (batch, length), generator=generator)
    labels[torch.rand(batch, length, generator=generator) < 0.3] = -100
    return logits, labels


def scored(labels):
    return [(row, column) for row, column in (labels != -100).nonzero().tolist()]


def distance(own, other, places):
    return sum(squared_distance(own[at].tolist(), other[at].tolist()) for at in places)


def hidden_outputs(seed: int):
    generator = torch.Generator().manual_seed(seed)
    encoder, decoder = torch.randn(2, 3, 4, generator=generator), torch.randn(2, 5, 4, generator=generator)
    return SimpleNamespace(encoder_last_hidden_state=encoder, decoder_hidden_states=(None, decoder))


def test_hidden_states_of_encoder_and_decoder():
    outputs, taught = hidden_outputs(0), hidden_outputs(1)
    labels = torch.tensor([[4, 4, 4, -100, -100], [4, 4, 4, 4, 4]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    both = (outputs, taught)
    decoder = distance(*(one.decoder_hidden_states[-1] for one in both), scored(labels))
    encoder = distance(*(one.encoder_last_hidden_state for one in both), map(tuple, mask.nonzero().tolist()))
    found = hidden_distance(*both, {"labels": labels, "attention_mask": mask})
    assert float(found) == pytest.approx(decoder + encoder / 5 * 8, rel=1e-5)


def test_hidden_states_of_one_stack():
    state, taught = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    labels = torch.tensor([[4, -100, 4], [4, 4, 4]])
    both = (SimpleNamespace(hidden_states=(one,)) for one in (state, taught))
    found = hidden_distance(*both, {"labels": labels, "attention_mask": torch.ones(2, 3)})
    assert float(found) == pytest.approx(distance(state, taught, scored(labels)), rel=1e-5)


class Fixed(torch.nn.Module):
    """A model whose logits are given."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, **inputs):
        return SimpleNamespace(logits=1 * self.logits)


def test_the_objective_mixes():
    logits, labels = logits_and_labels(3, 2, 4, 6)
    taught, _ = logits_and_labels(4, 2, 4, 6)
    student, teacher = Fixed(logits), Fixed(taught)
    objective = Objective(LossOptions(0.1, 0.3, 2.0), teacher)
    loss = objective(student, {"input_ids": labels, "labels": labels})
    expected = sum(
        (1 - 0.3) * smoothed(logits[at].tolist(), int(labels[at]), 0.1)
        + 0.3 * divergence(logits[at].tolist(), taught[at].tolist(), 2.0)
        for at in scored(labels)
    )
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    torch.autograd.backward(loss)
    assert teacher.logits.grad is None
    assert bool((student.logits.grad[labels == -100] == 0).all())


def test_even_use_of_experts_where_the_config_asks_for_it():
    """Eq. 4 of 2101.03961 over all layers: experts x sum of share of tokens x mean probability, times its weight."""
    model = tiny_mixture("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.25)
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    objective = Objective(LossOptions(0.0))
    plain = float(objective(model.eval(), batch).detach())
    with torch.no_grad():
        outputs = model(ids)
    expected = sum(smoothed(outputs.logits[at].tolist(), int(labels[at]), 0.0) for at in scored(labels))
    assert plain == pytest.approx(expected, rel=1e-4)  # while it is validated nothing is added
    probabilities = torch.cat([logits.softmax(dim=-1) for logits in outputs.router_logits])
    chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(2).indices, 1.0)
    balance = 8 * float((chosen.mean(dim=0) * probabilities.mean(dim=0)).sum())
    assert balance > 2.0
    trained = float(objective(model.train(), batch).detach())
    assert trained == pytest.approx(plain + 0.25 * 16 * balance, rel=1e-4)


@pytest.mark.parametrize(
    ("model_type", "name"), [("dbrx", "router_aux_loss_coef"), ("jetmoe", "aux_loss_coef")]
)
def test_classes_have_other_names_for_its_weight(model_type, name):
    model = tiny.build(model_type)
    model.config.output_router_logits = True
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    plain, trained = (Objective(LossOptions(0.0))(one(), batch) for one in (model.eval, model.train))
    added = getattr(model, name) * 18 * model(ids).aux_loss
    assert float(trained - plain) == pytest.approx(float(added), rel=1e-3)


# A file of the teacher's logits teaches what the teacher does.


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
def models():
    return [tiny_family(name, "llama", seed=seed) for name, seed in (("student", 0), ("teacher", 1))]


def taught(models, output, *, text=None, hidden=0.0, task=None, **changes):
    student, teacher = models
    loss = LossOptions(label_smoothing=0.0, distill=0.9, temperature=2.0, hidden=hidden)
    values = {"teacher": teacher, "steps": 4, "warmup": 1, "batch_tokens": 64, "loss": loss, "device": "cpu"}
    choice = TextChoice(files=(text or text_file("text.txt"),))
    options = TrainingOptions(**{**values, **changes})
    finetune(student, choice, Destination(Path(output)), options, task=task)
    return dict(load(output).named_parameters())


def test_it_teaches_what_the_teacher_does(models, monkeypatch):
    """The tiny model has fewer tokens than are kept: the weights are equal but for the file's 16 bits."""
    want = taught(models, "with-teacher")
    alone = taught(models, "without", teacher=None, loss=LossOptions(label_smoothing=0.0))
    path = "logits.safetensors"
    found = taught(models, "with-logits", teacher_logits=path)
    assert load_file(path)[TOKENS].shape[1] <= KEPT

    monkeypatch.setattr(training_data, "load_teacher", Mock(side_effect=AssertionError))
    again = taught(models, "again", teacher_logits=path)
    for name, weight in want.items():
        moved = (weight - alone[name]).abs().max()
        assert (found[name] - weight).abs().max() <= 0.05 * moved, name
        assert torch.equal(found[name], again[name])


def test_what_a_file_does_not_serve(models):
    path = Path("logits.safetensors")
    with pytest.raises(UsageError, match="`hidden_weight`"):
        taught(models, "out", teacher_logits=path, hidden=0.5)
    with pytest.raises(UsageError, match="needs a `teacher`"):
        taught(models, "out", teacher_logits=path, teacher=None)
    with pytest.raises(UsageError, match="`task=mlm`"):
        taught(models, "out", teacher_logits=path, task="mlm")
    with pytest.raises(OutputError, match="nowhere"):
        taught(models, "out", teacher_logits="nowhere/logits.safetensors")
    model, text = models[0], TextChoice(files=("text.txt",))
    options = {"device": "cpu", "teacher_logits": "nowhere/logits.safetensors"}
    with pytest.raises(UsageError, match="goes with `heal`"):
        shrink(model, text, ShrinkOptions(**options))
    with pytest.raises(OutputError, match="nowhere"):  # before anything is measured
        shrink(model, text, ShrinkOptions(**options, heal_steps=1))
    path.write_bytes(b"none")
    with pytest.raises(DataError, match="holds no teacher's logits"):
        taught(models, "out", teacher_logits=path)
    path.unlink()
    taught(models, "out", teacher_logits=path)
    other = text_file("other.txt", count=30)
    with pytest.raises(DataError, match="for another text"):
        taught(models, "other", teacher_logits=path, text=other)
