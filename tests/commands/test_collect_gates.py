"""`prunecli collect-gates`, typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prunecli.commands.collect_gates import collect_gates
from prunecli.results.gates import read_gates
from tests.commands.calls import Result, call, refused
from tests.forked import ended, start
from tests.tiny import tiny_nllb_moe

INTERRUPTED = """
import signal, sys
from prunecli.commands.app import main
from prunecli.running import runner

real, batches = runner.InMemory.running, []

def run(*arguments, **more):
    batches.append(1)
    if len(batches) == 3:
        signal.raise_signal(signal.SIGINT)
    return real(*arguments, **more)

runner.InMemory.running = run
main(sys.argv[1:])
"""
LINES = ["the hen", "a hat", "no", "the inn is on the tin", "hat and hen"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_nllb_moe(tmp_path / "model")
    (tmp_path / "text").mkdir()
    for language in ("eng_Latn", "fra_Latn", "deu_Latn"):
        (tmp_path / "text" / f"val.{language}").write_text("\n".join(LINES) + "\n")
    return tmp_path


def run(*arguments: str) -> Result:
    return call(collect_gates, *arguments)


def test_all_pairs_of_the_text(folder: Path) -> None:
    made = run("model", "--data", "text")
    assert made.status == 0, made.err
    assert "eng_Latn-fra_Latn" in made.out
    found = read_gates(folder / "gates.json")
    assert len(found.entries) == 6
    assert found.mode == "forced"
    assert sorted(path.name for path in folder.iterdir()) == ["gates.json", "model", "text"]
    raw = json.loads((folder / "gates.json").read_text())
    assert raw["format"] == "prunecli.gates/1"
    assert raw["models"][0]["path"] == "model"


def test_files_of_one_pair_merge_into_more(folder: Path) -> None:
    (folder / "a").write_text("the hen\n")
    (folder / "b").write_text("la poule\n")
    made = run("model", "--source-file", "a", "--target-file", "b", "--pairs", "eng_Latn-fra_Latn")
    assert made.status == 0, made.err
    assert list(read_gates(folder / "gates.json").entries) == ["eng_Latn-fra_Latn"]


def test_an_interrupt_keeps_what_is_done_and_the_same_command_goes_on(folder: Path) -> None:
    arguments = ("model", "--data", "text", "--batch-tokens", "8", "--compute-dtype", "float32")
    command = ("collect-gates", *arguments)
    ((status, _, err),) = ended(start(folder, *command, code=INTERRUPTED, processes=1))
    assert status == 130, err
    assert "Kept in .gates.json.partial: the same command goes on from it." in err
    assert "Interrupted" in err
    assert "Traceback" not in err
    assert not (folder / "gates.json").exists()
    # In processes of their own as well: the tests before this one may have changed how torch computes in this one.
    whole = _alone(folder, *arguments, "-o", "whole.json")  # another output has nothing to do with it
    assert "Going on" not in whole
    assert (folder / ".gates.json.partial").exists()
    assert "Going on from .gates.json.partial: 2 batches are done." in _alone(folder, *arguments)
    assert not (folder / ".gates.json.partial").exists()
    found, wanted = (json.loads((folder / name).read_text()) for name in ("gates.json", "whole.json"))
    for payload in (found, wanted):
        del payload["command"]
    assert found == wanted


def _alone(folder: Path, *arguments: str) -> str:
    ((status, _, err),) = ended(start(folder, "collect-gates", *arguments, processes=1))
    assert status == 0, err
    return err


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (("text", "--data", "text"), "config.json", 1),
        (("model", "--data", "text", "--pairs", "eng_Latn"), "eng_Latn", 2),
        (("model", "--source-file", "text/val.eng_Latn"), "--target-file", 2),
    ],
)
def test_bad_input_is_said_plainly(folder: Path, arguments: tuple[str, ...], said: str, status: int) -> None:
    refused(run(*arguments), said, status)
    assert not (folder / "gates.json").exists()
