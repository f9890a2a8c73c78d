"""Bad endings of `collect-gates` by several processes, as torchrun starts them."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from prunecli.commands.collect_gates import collect_gates
from tests.commands.calls import call, content
from tests.forked import ended, start
from tests.tiny import tiny_nllb_moe

LINES = ["the hen", "a", "no hen on the hat", "ten", "the inn", "the hat is in the inn"]
ARGUMENTS = ("model", "--data", "data", "--langs", "eng_Latn,fra_Latn", "--batch-tokens", "16")
DRIVER = """
import os, signal, sys, time
from pathlib import Path

from prunecli.methods.experts import collect
from prunecli.running import runner
from prunecli.running.layerwise import states as snapshot

collect.SAVE_EVERY_S = 0.0
runner.BATCHES_APART = 1
what, rank, calls = sys.argv[1], sys.argv[2], int(sys.argv[3])

def act():
    global calls
    calls -= 1
    if calls != 0 or os.environ["RANK"] != rank:
        return
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "fail":
        raise RuntimeError("a bug")
    Path("waiting").touch()
    time.sleep(60)

def watched(real):
    def run(*arguments, **more):
        act()
        return real(*arguments, **more)
    return run

runner.InMemory.running = watched(runner.InMemory.running)
snapshot.Snapshots.due = watched(lambda self: True)

from prunecli.commands.app import main
main(sys.argv[4:])
"""


@pytest.fixture
def folder(tmp_path):
    tiny_nllb_moe(tmp_path / "model", experts=16)
    (tmp_path / "data").mkdir()
    for language in ("eng_Latn", "fra_Latn"):
        (tmp_path / "data" / f"val.{language}").write_text("".join(f"{line}\n" for line in LINES))
    return tmp_path


def alone(*more: str) -> str:
    """Output of the run by one process, with as many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = call(collect_gates, *ARGUMENTS, *more)
    finally:
        torch.set_num_threads(threads)
    assert result.status == 0, result.err
    return result.err


def assert_same(path: Path) -> None:
    """The file is that of one process, which had nothing to go on from."""
    assert "Resuming" not in alone("-o", "one.json")
    assert content(path) == content(path.with_name("one.json"))


def left(folder: Path) -> list[str]:
    known = {"model", "data", "waiting"}
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def test_one_that_is_killed_ends_the_other_and_one_alone_goes_on(folder):
    first, second = ended(start(folder, "kill", "1", "3", "collect-gates", *ARGUMENTS, code=DRIVER))
    assert (first[0], first[1], second[0]) == (1, "", -signal.SIGKILL)
    assert "process 0 of 2 stops: " in first[2]
    assert "Kept in .gates.json.partial: the same command resumes from it." in first[2]
    assert left(folder) == [".gates.json.partial"]
    assert "Resuming from .gates.json.partial: 4 batches are done." in alone()
    assert left(folder) == ["gates.json"]
    assert_same(folder / "gates.json")


def test_control_c_ends_all(folder):
    """The terminal, or torchrun, hands the signal to each."""
    processes = start(folder, "wait", "1", "3", "collect-gates", *ARGUMENTS, code=DRIVER)
    deadline = time.monotonic() + 60
    while not (folder / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        os.kill(process.process.pid, signal.SIGINT)
    first, second = ended(processes)
    assert 0 not in (first[0], second[0])
    assert first[1] == second[1] == ""
    assert "Kept in .gates.json.partial: the same command resumes from it." in first[2]
    assert left(folder) == [".gates.json.partial"]
    assert "Resuming from .gates.json.partial" in alone()
