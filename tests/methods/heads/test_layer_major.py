"""Importance layer by layer against that of the whole model."""

from typing import Any

import numpy as np
import pytest
import torch

from prunecli.model.checkpoint import open_model
from prunecli.running.examples import Batch
from prunecli.running.layerwise.runner import Layerwise, RunReport
from tests.families.records import CASES
from tests.methods.experts.test_layerwise import PLENTY
from tests.methods.heads.test_score import HeadSums, Subject
from tests.running.layerwise.running import no_room

CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""Relative; the gradients of an encoder's output are summed layer by layer, in another order than in memory."""


def layered(subject: Subject, batches: list[Batch], **more: Any) -> tuple[HeadSums, RunReport]:
    work = RunReport()
    with open_model(subject.checkpoint.path) as checkpoint:
        runner = Layerwise(checkpoint, CPU, torch.float32, PLENTY, report=work)
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


def test_what_is_reckoned_is_what_is_kept(tmp_path, monkeypatch):
    """The predicted memory of a group is enough, and little of it is left over."""
    subject, groups = Subject(tmp_path / "model", "nllb-moe"), []
    real = Layerwise.groups
    monkeypatch.setattr(Layerwise, "groups", lambda *args: groups.append(real(*args)) or groups[0])
    no_room(monkeypatch, 0)
    _, work = layered(subject, subject.batches(1000))
    ((states,),) = (group.cost.states for group in groups[0])
    assert 0.4 * states < work.spilled_bytes < 1.05 * states + 4096
