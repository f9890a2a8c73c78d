"""The state of a training on a disk that is too small, or full by the time that the training writes to it."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from prunecli.errors import OutputError, UsageError
from prunecli.model.checkpoint import open_model
from prunecli.processes import ALONE
from prunecli.text.choice import TextChoice
from prunecli.training import finetune as finetuning
from prunecli.training import trainer
from prunecli.training.finetune import Destination, finetune
from prunecli.training.state import WORKSPACE, fixed_order, repeatable
from prunecli.training.trainer import training_arguments
from tests.failing import FULL, failing_after
from tests.families import tiny_family
from tests.training.runs import OPTIONS, options, train, translation, write_parallel

TORCH = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 640 vs 598")


@pytest.fixture
def run():
    """Train the same model again, for 6 updates with a validation after each second; returns what was said."""
    model = tiny_family("model", "m2m_100", dropout=0.2)
    write_parallel(Path(), train=40, val=8)

    def call(name="out", **more):
        said = []
        choice = TextChoice(data=".", split="train", pairs="eng_Latn-fra_Latn")
        finetune(model, choice, Destination(Path(name), **more), OPTIONS, say=said.append)
        return said

    return call


def test_the_space_is_checked_before_the_first_step(run, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=16 << 20))
    monkeypatch.setattr(trainer, "repeatable", None)  # called before the first step
    with pytest.raises(OutputError, match=r"17\.\d\d MiB are needed, 16\.00 MiB are free"):
        run()
    assert not list(Path().glob("*out*"))


@pytest.mark.parametrize("more", [{}, {"save_every": 2, "keep_at": (3,), "dtype": "float64"}])
def test_the_space_is_what_a_training_holds_at_most(run, monkeypatch, more):
    needed, held, remove = [], [], shutil.rmtree

    def look(*arguments, **options):
        files = [path for path in Path().glob("out*/**/*") if path.suffix in (".safetensors", ".pt")]
        held.append(sum(path.stat().st_size for path in files))
        remove(*arguments, **options)

    monkeypatch.setattr(trainer, "require_space", lambda _, nbytes: needed.append(nbytes))
    monkeypatch.setattr(shutil, "rmtree", look)
    run(**more)
    headers = 400_000  # of files with few bytes a tensor; a state of this model has 560,000
    assert needed[0] <= max(held) < needed[0] + headers


@pytest.mark.parametrize(
    ("owner", "function", "calls", "error", "left"),
    [(trainer, "save_tensors", 1, FULL, 2), (torch, "save", 0, TORCH, 0)],
)
def test_a_state_that_cannot_be_written_leaves_the_one_before(
    run, monkeypatch, owner, function, calls, error, left
):
    run("whole")
    with monkeypatch.context() as patched:
        patched.setattr(owner, function, failing_after(calls, getattr(owner, function), error))
        with pytest.raises(OutputError, match="the disk is full") as caught:
            run()
    assert (f"checkpoint-{left} is kept" if left else "the updates so far are lost") in str(caught.value)
    assert Path("out.training").exists() == bool(left)
    assert any(line.startswith(f"Resuming from step {left}") for line in run()) == bool(left)
    assert weights("out") == weights("whole")


def weights(directory):
    return Path(directory, "model.safetensors").read_bytes()


def test_a_result_that_cannot_be_written_is_written_by_the_next_run(run, monkeypatch):
    run("whole")
    with monkeypatch.context() as patched:
        patched.setattr(finetuning, "apply", failing_after(0, finetuning.apply))
        with pytest.raises(OutputError, match=r"the disk is full.*; the trained weights are") as caught:
            run()
    assert "with `force`: it only writes" not in str(caught.value)
    assert run()[-1] == "The training had ended before; writing its result."
    assert weights("out") == weights("whole")
    assert not Path("out.training").exists()


# What training on a GPU asks of torch so that its numbers come again, without one.

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


def test_what_torch_lacks_is_said_and_goes_on():
    said = list[str]()
    lacking = "some_kernel does not have a deterministic implementation, but you set …"
    with repeatable(CARD, Mock(side_effect=RuntimeError(lacking)), ALONE, said.append):
        assert flags() == (True, True)
    assert said[0].startswith("some_kernel adds in no fixed order on a GPU")


def test_the_batch_beforehand_leaves_nothing_behind(monkeypatch):
    path = tiny_family("model", "m2m_100")
    made = []
    for name in ("without", "with"):
        if name == "with":
            monkeypatch.setattr(trainer, "repeatable", lambda _device, *more: repeatable(CARD, *more))
        trained = train(path, name, options(steps=3, warmup=1, dropout=0.3), translation(20, 5))
        found = open_model(trained.staged)
        made.append({tensor: found.read(tensor) for tensor in found.tensors})
    assert all((made[0][tensor] == made[1][tensor]).all() for tensor in made[0])


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    said = r"^4 processes on this machine, and 2 GPUs: .*\n.*--nproc-per-node 2"
    with pytest.raises(UsageError, match=said):
        training_arguments(options(device="auto"), Path(), validates=True)
    assert WORKSPACE not in os.environ
