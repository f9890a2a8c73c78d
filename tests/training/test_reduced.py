"""Reduced checkpoints are trained as they are: what was removed stays removed, what is shared stays one parameter."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from prunecli import load_model
from prunecli.commands.share_ffn import share_ffn
from prunecli.methods.heads.plan import HeadPlan
from prunecli.methods.heads.rewrite import rewrite_heads
from prunecli.model.checkpoint import open_model
from prunecli.model.rewrite import rewritten
from prunecli.pipeline import apply
from prunecli.training.options import LossOptions
from prunecli.training.result import outputs_of
from tests.families import tiny_family
from tests.training.runs import language_model, options, train, translation

KEPT = ((1, 3), (), (0, 2, 3), (3,))
"""Of four heads, in layer after layer."""


def trained_and_written(source, folder, data, **changes):
    """Train `source`, write the result as the command does, and give its path."""
    made = train(source, folder / "state", options(steps=2, learning_rate=1e-2, **changes), data)
    with open_model(source) as before, open_model(made.staged) as weights:
        outputs = outputs_of(before, weights, None)
        apply(weights, rewritten(weights, before.structure, outputs, {"command": "finetune"}), folder / "out")
    return folder / "out"


def unchanged(one, other):
    """Names of the tensors that two checkpoints have alike."""
    with open_model(one) as first, open_model(other) as second:
        assert dict(first.tensors) == dict(second.tensors)
        return {name for name in first.tensors if np.array_equal(first.read(name), second.read(name))}


def material_for(family):
    return language_model() if family in ("gpt2", "llama") else translation()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["m2m_100", "marian", "t5", "gpt2", "llama"])
def test_without_heads(tmp_path, family, dtype):
    with open_model(tiny_family(tmp_path / "model", family)) as source:
        kept = {layer.name: ids for layer, ids in zip(source.layout.attentions, cycle(KEPT), strict=False)}
        rewrite = rewrite_heads(source, HeadPlan(kept))
        apply(source, rewrite, tmp_path / "reduced")
    written = trained_and_written(tmp_path / "reduced", tmp_path, material_for(family), dtype=dtype)
    same = unchanged(tmp_path / "reduced", written)
    # Nothing reaches an attention without heads, nor the norm before it; Marian has a bias that is no parameter.
    parts = ("attn", "ttention", "norm", "ln_1", "final_logits_bias")
    assert all(any(part in name for part in parts) for name in same)
    assert len(same) < len(open_model(written).tensors) / 3
    with open_model(tmp_path / "reduced") as before, open_model(written) as after:
        assert after.structure.heads == before.structure.heads


def shared(source, output, configuration):
    """What share-ffn writes."""
    app = typer.Typer()
    app.command()(share_ffn)
    result = CliRunner().invoke(app, [str(source), "--config", configuration, "-o", str(output), "--quiet"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return output


@pytest.mark.parametrize("configuration", ["SharedEncNoDec", "SharedEncSharedDec", "OneWide"])
@pytest.mark.parametrize("family", ["m2m_100", "bart", "t5"])
def test_with_shared_and_removed_ffns(tmp_path, family, configuration):
    sizes = {} if family == "t5" else {"decoder_ffn_dim": 48}
    model = tiny_family(tmp_path / "model", family, **sizes)
    source = shared(model, tmp_path / "reduced", configuration)
    written = trained_and_written(source, tmp_path, translation())
    assert unchanged(source, written) <= {"final_logits_bias"}
    before, after = load_model(source, device="cpu"), load_model(written, device="cpu")
    # A shared FFN is held once.
    assert [name for name, _ in before.named_parameters()] == [name for name, _ in after.named_parameters()]
    with open_model(source) as one, open_model(written) as other:
        assert other.structure.ffn == one.structure.ffn


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_with_a_shared_ffn_in_a_language_model(tmp_path, family):
    model = tiny_family(tmp_path / "model", family)
    source = shared(model, tmp_path / "reduced", "SharedDec")
    written = trained_and_written(source, tmp_path, language_model())
    assert unchanged(source, written) == set()


def test_a_teacher_for_a_reduced_model(tmp_path):
    model = tiny_family(tmp_path / "model", "m2m_100", decoder_ffn_dim=48)
    source = shared(model, tmp_path / "reduced", "SharedEncNoDec")
    loss = LossOptions(distill=0.5, hidden=0.1)
    written = trained_and_written(source, tmp_path, translation(), teacher=model, loss=loss)
    assert unchanged(source, written) == set()
