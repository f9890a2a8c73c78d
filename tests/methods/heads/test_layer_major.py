"""Importance layer by layer against that of the whole model."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.errors import CheckpointError, DataError, OutputError, UsageError
from prunecli.model.checkpoint import open_model
from prunecli.running.encoding import labelled_examples
from prunecli.running.examples import IGNORED, Batch
from prunecli.running.layerwise import runner as machinery
from prunecli.running.layerwise.runner import Layerwise, Resources, RunReport
from prunecli.running.runner import InMemory
from prunecli.text.plain import read_labelled
from tests.families.records import CASES
from tests.methods.experts.test_layerwise import PLENTY
from tests.methods.heads.test_score import LINES, HeadSums, Subject
from tests.running.layerwise.running import at_step, no_room

CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""Relative; the gradients of an encoder's output are summed layer by layer, in another order than in memory."""


def layered(
    subject: Subject, batches: list[Batch], memory: int = PLENTY, **more: Any
) -> tuple[HeadSums, RunReport]:
    work = RunReport()
    with open_model(subject.checkpoint.path) as checkpoint:
        runner = Layerwise(checkpoint, Resources(CPU, torch.float32, memory, more.pop("spill", None)), work)
        named = {"val": batches[:1], "more": batches[1:]}
        found = subject.importance(runner, named, **more)
        assert all(parameter.grad is None for parameter in runner.model.parameters())
    return found, work


def assert_close(found: HeadSums, wanted: HeadSums) -> None:
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        assert (values > 0).all()
        np.testing.assert_allclose(found[name], values, rtol=TOLERANCE)
        assert found[name].dtype == np.float64


@pytest.mark.parametrize("model_type", ["nllb-moe", "t5", "bert", "gpt2", "gemma2"])
def test_every_family(model_type, tmp_path):
    subject = Subject(tmp_path / "model", model_type)
    per = "token" if model_type in ("nllb-moe", "t5", "bert", "gpt2") else "example"
    batches, wanted = subject.batches(40), subject.score(40, per)
    assert len(batches) > 1
    found, work = layered(subject, batches, per=per)
    assert_close(found, wanted)
    if CASES[model_type].task != "translation":
        assert all((found[name] == values).all() for name, values in wanted.items()), "to the last bit"
    assert work.readings == 1
    assert work.bytes_read < 2 * subject.checkpoint.total_bytes


def test_classes(tmp_path):
    subject = Subject(tmp_path / "m", "bert", architectures=["BertForSequenceClassification"], num_labels=3)
    (tmp_path / "labelled").write_text("".join(f"{i % 3}\t{line}\n" for i, line in enumerate(LINES)))
    text = read_labelled(tmp_path / "labelled")
    batches = labelled_examples(subject.tokenizer, subject.model, text).batches(60)
    wanted = subject.importance(InMemory(subject.model), {"val": batches})
    assert_close(layered(subject, batches)[0], wanted)


def test_what_is_reckoned_is_what_is_kept(tmp_path, monkeypatch):
    """The predicted memory of a group is enough, and little of it is left over."""
    subject, groups = Subject(tmp_path / "model", "nllb-moe"), []
    real = Layerwise.groups
    monkeypatch.setattr(Layerwise, "groups", lambda *args: groups.append(real(*args)) or groups[0])
    no_room(monkeypatch, 0)
    _, work = layered(subject, subject.batches(1000))
    ((states,),) = (group.cost.states for group in groups[0])
    assert 0.4 * states < work.spilled_bytes < 1.05 * states + 4096


def test_nothing_is_read_before_it_is_known_to_do(tmp_path, monkeypatch):
    subject = Subject(tmp_path / "model", "bert")
    monkeypatch.setattr(machinery, "fill_resident", lambda *_: pytest.fail("read"))
    with pytest.raises(UsageError, match="memory=1MiB` is too little: the smallest that works is"):
        layered(subject, subject.batches(40), 1 << 20)
    no_room(monkeypatch, 100, 100)
    with pytest.raises(OutputError, match="no room for the states of one batch"):
        layered(subject, subject.batches(40))


def test_a_shard_cut_short_meanwhile(tmp_path):
    subject, file = Subject(tmp_path / "model", "m2m_100"), tmp_path / "model" / "model.safetensors"
    advance = at_step(13, lambda: os.truncate(file, 10_000))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated while it was read"):
        layered(subject, subject.batches(40), progress=lambda *_: nullcontext(advance))


def test_a_loss_that_is_not_finite_names_text_and_example(tmp_path):
    subject = Subject(tmp_path / "m", "bert")
    batches = subject.batches(1)
    batches[1].labels[:] = IGNORED
    batches[1].labels[0, 1] = 0
    work = RunReport()
    with open_model(subject.checkpoint.path) as checkpoint:
        runner = Layerwise(checkpoint, Resources(CPU, torch.float32, PLENTY), work)
        seen = []

        def hurt(_module, _inputs, output):
            seen.append(output)
            return output * float("nan") if len(seen) == 2 else output

        runner.model.cls.register_forward_hook(hurt)
        expected = rf"more, example {batches[1].indices[0] + 1}: the loss is nan"
        with pytest.raises(DataError, match=expected):
            subject.importance(runner, {"val": batches[:1], "more": batches[1:]})
