"""Losses layer by layer are those of the whole model, to the last bit."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from prunecli.errors import DataError, UsageError
from prunecli.evaluation.evaluate import evaluate
from prunecli.evaluation.options import EvaluationOptions
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from prunecli.modules.stock_experts import own_experts
from prunecli.running.batches import batch_cost
from prunecli.running.examples import Batch
from prunecli.running.layerwise.runner import Layerwise, RunReport
from prunecli.running.runner import InMemory
from prunecli.text.choice import TextChoice
from prunecli.text.tokens import load_tokenizer
from tests.evaluation.losses import TextLosses, lm_losses, mlm_losses
from tests.families import tiny_family
from tests.stock_mixtures import save_mixture
from tests.tiny import tiny_nllb_moe

Measure = Callable[..., TextLosses]
LINES = ("the hat on a hen", "no", "then ten of the hats " * 9, "a hen in the inn", "tin")
CPU, PLENTY = torch.device("cpu"), 1 << 34


def layered(path: Path, measure: Measure = lm_losses) -> tuple[TextLosses, RunReport]:
    work = RunReport()
    with open_model(path) as checkpoint:
        runner = Layerwise(checkpoint, CPU, torch.float32, PLENTY, report=work, output=True)
        return measure(runner, load_tokenizer(path), LINES, 40), work


def whole(path: Path, measure: Measure = lm_losses, *, own: bool = False) -> TextLosses:
    """In memory; experts are added up in their order, as layer by layer, if `own`, else as transformers does it."""
    model = load_model(path, device="cpu", dtype="float32")
    with own_experts(model) if own else nullcontext():
        return measure(InMemory(model), load_tokenizer(path), LINES, 40)


def assert_same(one: TextLosses, other: TextLosses) -> None:
    assert other.nats.min() > 0
    assert np.array_equal(one.nats, other.nats)
    assert np.array_equal(one.tokens, other.tokens)


@pytest.mark.parametrize(("model_type", "measure"), [("gpt2", lm_losses), ("bert", mlm_losses)])
def test_families(model_type, measure, tmp_path):
    path = tiny_family(tmp_path / "model", model_type)
    found, work = layered(path, measure)
    assert_same(found, whole(path, measure))
    assert work.readings == 1
    with open_model(path) as checkpoint:
        assert 0 < work.bytes_read <= checkpoint.total_bytes


def test_a_loss_that_is_not_finite_names_the_text(tmp_path):
    path = tiny_family(tmp_path / "model", "gpt2")
    with open_model(path) as checkpoint:
        runner = Layerwise(checkpoint, CPU, torch.float32, PLENTY)
        final = runner.model.transformer.ln_f.register_forward_hook(
            lambda _m, _i, output: output * float("nan")
        )
        with pytest.raises(DataError, match="example 1: the loss is nan"):
            lm_losses(runner, load_tokenizer(path), LINES[:1], 40)
        final.remove()


def states_of(path: Path, source: int, target: int) -> list[tuple[int, ...]]:
    """Bytes of states of 2 translations with so many tokens: forwards, and with gradients."""
    ids, targets = (torch.ones(2, length, dtype=torch.long) for length in (source, target))
    batch = Batch({"input_ids": ids, "decoder_input_ids": targets}, targets, (0, 1))
    with open_model(path) as checkpoint:
        runner = Layerwise(checkpoint, CPU, torch.float32, PLENTY)
        return [batch_cost(runner, batch, backward=way).states for way in (False, True)]


def test_what_a_batch_takes_in_a_mixture_of_experts(tmp_path):
    forward, back = states_of(tiny_nllb_moe(tmp_path / "a", layers=4), 5, 5)
    output, rows = 10 * 16 * 4, 10 * 2 * 16 * 4
    assert forward == (2 * (output + rows),)
    assert back == (2 * (5 * output + 2 * rows + 2 * rows),), "two sparse layers; rows and gradients of one"


# Losses of mixtures in their stock classes, layer by layer, are those of the whole model.


KINDS = ("gpt_oss", "granitemoehybrid", "qwen3_next")
"""Families with attentions, states or layouts of different kinds; gate statistics are collected of all by layer."""


@pytest.mark.parametrize("model_type", KINDS)
def test_every_kind_of_layer(model_type, tmp_path):
    path = save_mixture(tmp_path / "model", model_type)
    found, work = layered(path)
    assert_same(found, whole(path, own=True))
    np.testing.assert_allclose(found.nats, whole(path).nats, rtol=1e-6)
    with open_model(path) as checkpoint:
        assert work.readings == 1
        assert 0 < work.bytes_read <= checkpoint.total_bytes


def test_a_family_that_runs_whole_is_refused(tmp_path):
    path = save_mixture(tmp_path / "model", "kimi_linear")
    (tmp_path / "text").write_text("the hen\n")
    data = TextChoice(files=(tmp_path / "text",)).read("lm")
    with pytest.raises(UsageError, match="a model of type kimi_linear is measured with the whole"):
        evaluate({"model": path}, data, EvaluationOptions(device="cpu", memory=PLENTY))
