"""What training on a GPU asks of torch so that its numbers come again, without one."""

from __future__ import annotations

import os

import pytest
import torch

from prunecli.errors import UsageError
from prunecli.model.checkpoint import open_model
from prunecli.processes import ALONE
from prunecli.training import trainer as training
from prunecli.training.state import WORKSPACE, fixed_order, repeatable
from prunecli.training.trainer import training_arguments
from tests.families import tiny_family
from tests.training.runs import options, train, translation

CARD = torch.device("cuda", 0)


def flags() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def test_one_order_within_the_block_alone():
    seen, said = [], list[str]()
    with repeatable(CARD, lambda: seen.append(flags()), ALONE, said.append):
        seen.append(flags())
        assert not torch.utils.deterministic.fill_uninitialized_memory
        with fixed_order(CARD, warn_only=True):
            seen.append(flags())
        seen.append(flags())
    assert seen == [(True, False), (True, False), (True, True), (True, False)]
    assert (flags(), said) == ((False, False), [])
    with fixed_order(torch.device("cpu"), warn_only=True):
        assert flags() == (False, False)


def failing(message: str) -> None:
    raise RuntimeError(message)


def test_what_torch_lacks_is_said_and_goes_on():
    said = list[str]()
    lacking = "some_kernel does not have a deterministic implementation, but you set …"
    with repeatable(CARD, lambda: failing(lacking), ALONE, said.append):
        assert flags() == (True, True)
    assert said[0].startswith("some_kernel adds in no fixed order on a GPU")


def test_the_batch_beforehand_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tiny_family(tmp_path / "model", "m2m_100")
    made = []
    for name in ("without", "with"):
        if name == "with":
            monkeypatch.setattr(
                training, "repeatable", lambda _device, *probe_and_all: repeatable(CARD, *probe_and_all)
            )
        trained = train(path, tmp_path / name, options(steps=3, warmup=1, dropout=0.3), translation(20, 5))
        with open_model(trained.staged) as found:
            made.append({tensor: found.read(tensor) for tensor in found.tensors})
    assert all((made[0][tensor] == made[1][tensor]).all() for tensor in made[0])


def test_more_processes_than_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UsageError) as refused:
        training_arguments(options(device="auto"), tmp_path, validates=True)
    assert refused.value.message.startswith("4 processes on this machine, and 2 GPUs: ")
    assert "--nproc-per-node 2" in str(refused.value.remedy)
    assert WORKSPACE not in os.environ
