"""`prunecli collect-gates`, typed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prunecli.methods.experts.statistics import read_gates
from tests.tiny import tiny_nllb_moe

LINES = ["the hen", "a hat", "no", "the inn is on the tin", "hat and hen"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_nllb_moe(tmp_path / "model")
    (tmp_path / "text").mkdir()
    for language in ("eng_Latn", "fra_Latn", "deu_Latn"):
        (tmp_path / "text" / f"val.{language}").write_text("\n".join(LINES) + "\n")
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prunecli", "collect-gates", *arguments]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True)


def test_all_pairs_of_the_text(folder: Path) -> None:
    made = run(folder, "model", "--data", "text")
    assert made.returncode == 0, made.stderr
    assert "eng_Latn-fra_Latn" in made.stdout
    found = read_gates(folder / "gates.json")
    assert len(found.entries) == 6
    assert found.mode == "forced"
    assert sorted(path.name for path in folder.iterdir()) == ["gates.json", "model", "text"]
    raw = json.loads((folder / "gates.json").read_text())
    assert raw["format"] == "prunecli.gates/1"
    assert raw["models"][0]["path"] == "model"


def test_an_existing_file_is_kept_unless_forced(folder: Path) -> None:
    (folder / "gates.json").write_text("mine")
    refused = run(folder, "model", "--data", "text")
    assert refused.returncode == 1
    assert "gates.json" in refused.stderr
    assert (folder / "gates.json").read_text() == "mine"
    assert run(folder, "model", "--data", "text", "--force", "--max-sentences", "2").returncode == 0
    assert len(read_gates(folder / "gates.json").entries) == 6


def test_files_of_one_pair_merge_into_more(folder: Path) -> None:
    (folder / "a").write_text("the hen\n")
    (folder / "b").write_text("la poule\n")
    made = run(folder, "model", "--source-file", "a", "--target-file", "b", "--pairs", "eng_Latn-fra_Latn")
    assert made.returncode == 0, made.stderr
    assert list(read_gates(folder / "gates.json").entries) == ["eng_Latn-fra_Latn"]


def test_an_interrupt_keeps_what_is_done_and_the_same_command_goes_on(folder: Path) -> None:
    for language in ("eng_Latn", "fra_Latn", "deu_Latn"):
        (folder / "text" / f"val.{language}").write_text("\n".join(LINES * 60) + "\n")
    arguments = ("model", "--data", "text", "--batch-tokens", "8", "--mode", "beam", "--beam", "2", "-o")
    process = subprocess.Popen(
        command(*arguments, "gates.json"), cwd=folder, stderr=subprocess.PIPE, text=True
    )
    time.sleep(7)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "Interrupted" in said
    assert "Traceback" not in said
    assert not (folder / "gates.json").exists()
    small = ("model", "--data", "text", "--max-sentences", "4", "-o", "other.json")
    assert run(folder, *small).returncode == 0  # another output has nothing to do with it
    assert (folder / ".gates.json.partial").exists() or "Kept" not in said


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (("missing", "--data", "text"), "missing", 1),
        (("text", "--data", "text"), "config.json", 1),
        (("model", "--data", "nowhere"), "nowhere", 1),
        (("model", "--data", "text", "--split", "test"), "test", 1),
        (("model", "--data", "text", "--langs", "eng_Latn,xxx_Latn"), "xxx_Latn", 1),
        (("model", "--data", "text", "--pairs", "eng_Latn"), "eng_Latn", 2),
        (("model", "--data", "text", "--max-sentences", "99"), "99", 1),
        (("model", "--data", "text", "--mode", "guess"), "guess", 2),
        (("model", "--source-file", "text/val.eng_Latn"), "--target-file", 2),
    ],
)
def test_bad_input_is_said_plainly(folder: Path, arguments: tuple[str, ...], said: str, status: int) -> None:
    made = run(folder, *arguments)
    assert said in made.stderr
    assert "Traceback" not in made.stderr
    assert made.returncode in (1, 2)
    if status == 1:
        assert made.returncode == 1
    assert not (folder / "gates.json").exists()


def test_files_of_different_lengths_are_refused(folder: Path) -> None:
    (folder / "text" / "val.fra_Latn").write_text("un\n")
    made = run(folder, "model", "--data", "text")
    assert made.returncode == 1
    assert "val.fra_Latn" in made.stderr


def test_a_dense_family_is_refused(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "bloom"}))
    made = run(folder, "model", "--data", "text")
    assert made.returncode == 1
    assert "bloom" in made.stderr
