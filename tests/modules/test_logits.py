"""Blocks of positions: the same losses and gradients as the whole batch's logits, of every family and of odd heads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from prunecli.modules import logits
from prunecli.running.batches import token_losses
from prunecli.running.examples import Batch
from prunecli.text.choice import TaskName
from prunecli.training.loss import Objective
from prunecli.training.options import LossOptions
from tests.families import tiny, tiny_family
from tests.families.records import CASES
from tests.opening import load
from tests.reference.losses import nll
from tests.tiny import VOCAB


def batch_of(task: TaskName, vocabulary: int = VOCAB) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, vocabulary, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 7:] = mask[2, 2:] = 0
    labels = torch.randint(4, vocabulary, (3, 11), generator=generator) if task != "lm" else ids.clone()
    labels[mask == 0] = -100
    labels[0, 2:5] = -100
    if task == "lm":  # each token is predicted at the one before it
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if task == "translation":
        inputs |= {"decoder_input_ids": ids.flip(1), "decoder_attention_mask": torch.ones_like(ids)}
    return Batch(inputs, labels, (0, 1, 2))


def expected(model: Any, batch: Batch) -> list[float]:
    """From the whole logits, one position at a time."""
    with torch.no_grad():
        logits = model(**batch.inputs).logits
    return [
        sum(
            nll(logits[row, place].tolist(), int(batch.labels[row, place]))
            for place in range(batch.labels.shape[1])
            if batch.labels[row, place] != -100
        )
        for row in range(3)
    ]


def positions(monkeypatch: pytest.MonkeyPatch, count: int, vocabulary: int) -> None:
    monkeypatch.setattr(logits, "BLOCK_VALUES", count * vocabulary)


def heads_given(model: Any) -> list[int]:
    """Positions that the output layer is given, call by call."""
    given = []
    layer = model.get_output_embeddings()
    layer.register_forward_pre_hook(lambda _m, inputs: given.append(inputs[0][..., 0].numel()))
    return given


@pytest.mark.parametrize(
    "model_type", ["m2m_100", "bart", "t5", "bert", "distilbert", "gpt2", "opt", "gemma2"]
)
def test_every_declared_family(model_type, models, monkeypatch):
    model = load(models[model_type])
    batch = batch_of(CASES[model_type].task, model.config.vocab_size)
    wanted = expected(model, batch)
    positions(monkeypatch, 4, model.config.vocab_size)
    given = heads_given(model)
    with torch.no_grad():
        sums, _ = token_losses(model, batch)
    assert sums.tolist() == pytest.approx(wanted, rel=1e-4)
    assert max(given) == 4
    assert sum(given) == int((batch.labels != -100).sum()), "no position that nobody counts"


@pytest.mark.parametrize(("model_type", "task"), [("modernbert", "mlm"), ("modernbert-decoder", "lm")])
def test_an_output_layer_that_is_called_a_decoder(model_type, task, monkeypatch):
    model = tiny.build(model_type)
    batch = batch_of(task)
    wanted = expected(model, batch)
    positions(monkeypatch, 4, model.config.vocab_size)
    with torch.no_grad():
        sums, _ = token_losses(model, batch)
        found = logits.Logits(model, batch.arguments(model), batch.labels != -100, by_states=True)
        assert len(found.of_states(found.states[:3])) == 3
    assert sums.tolist() == pytest.approx(wanted, rel=1e-4)


class _Odd(nn.Module):
    """A model whose head is not one position's business."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.config = SimpleNamespace(vocab_size=60)
        self.device = torch.device("cpu")
        self.body = _Table()
        self.lm_head = nn.Linear(8, 60)

    @property
    def base_model(self) -> Any:
        return self if self.kind == "no body" else self.body

    def get_decoder(self) -> Any:
        return self.base_model

    def forward(self, input_ids: Any, **_options: Any) -> Any:
        hidden = self.body(input_ids)
        hidden = hidden[0] if self.kind == "a tuple" else hidden["last_hidden_state"]
        if self.kind == "twice":
            hidden = hidden + self.body(input_ids)["last_hidden_state"]
        if self.kind == "all positions at once":
            hidden = hidden.view(*input_ids.shape, -1).cumsum(1)
        return SimpleNamespace(logits=self.lm_head(hidden))


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 8)

    def forward(self, input_ids: Any) -> Any:
        return BaseModelOutput(last_hidden_state=self.table(input_ids))


@pytest.mark.parametrize("kind", ["no body", "a tuple", "twice", "all positions at once"])
def test_heads_that_cannot_be_cut_are_whole(kind, monkeypatch):
    torch.manual_seed(0)
    model, batch = _Odd(kind), batch_of("lm", 60)
    wanted = expected(model, batch)
    positions(monkeypatch, 5, 60)
    sums, _ = token_losses(model, batch)
    assert sums.tolist() == pytest.approx(wanted, rel=1e-4)


def test_an_error_below_the_head_is_not_hidden(monkeypatch):
    model, batch = _Odd("no error"), batch_of("lm", 60)
    model.body.forward = lambda *_: 1 / 0  # type: ignore[method-assign]
    positions(monkeypatch, 5, 60)
    with pytest.raises(ZeroDivisionError):
        token_losses(model, batch)


def test_gradients_are_those_of_the_whole(models, monkeypatch):
    """With a teacher, and the distance of hidden states."""
    model = load(models["t5"])
    teacher = load(tiny_family("model", "t5", seed=1)).requires_grad_(False)
    batch = batch_of(CASES["t5"].task, model.config.vocab_size)
    given = {**batch.inputs, "labels": batch.labels}
    objective = Objective(LossOptions(0.1, 0.3, 2.0, 0.5), teacher)

    def run():
        model.zero_grad()
        loss = objective(model, given)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss, gradients = run()
    positions(monkeypatch, 4, model.config.vocab_size)
    calls = heads_given(model)
    found, others = run()
    assert max(calls) == 4
    assert found == pytest.approx(loss, rel=1e-5)
    assert len(gradients) == len(others) > 10
    for one, other in zip(gradients, others, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)


def test_perceiver_predicts_at_more_positions_than_a_text_has():
    model, batch = tiny.build("perceiver"), batch_of("mlm", 90)
    with torch.no_grad():
        found = token_losses(model, batch)[0].tolist()
    assert found == pytest.approx(expected(model, batch), rel=1e-4)
