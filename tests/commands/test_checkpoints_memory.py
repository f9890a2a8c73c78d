"""`--memory` and `--spill-dir` of `evaluate` and `score-heads`, typed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from prunecli.commands.evaluate import evaluate
from prunecli.commands.score_heads import score_heads
from prunecli.errors import CheckpointError, OutputError, PruneError, UsageError
from prunecli.running.layerwise import runner
from prunecli.running.layerwise.forward import LayerPasses
from prunecli.running.layerwise.states import StateStore
from tests.commands.calls import raising
from tests.families import tiny_family
from tests.forked import ended, start
from tests.tiny import tiny_nllb_moe

COMMANDS = {"evaluate": evaluate, "score-heads": score_heads}
LM = ("model", "--task", "lm", "--text", "text.txt", "--batch-tokens", "20")
EVALUATE, GRADIENT = ("evaluate", *LM), ("score-heads", *LM)
GATES = ("collect-gates", "model", "--data", "data")
SPILL = ("--memory", "8GiB", "--spill-dir", ".")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # which the command would set for good
    tiny_family(tmp_path / "model", "gpt2")
    (tmp_path / "text.txt").write_text("the hat\nno\nten hens in the inn\n" + "the tin " * 60 + "\n")
    (tmp_path / "data").mkdir()
    for language in ("eng_Latn", "fra_Latn"):
        (tmp_path / "data" / f"val.{language}").write_text("the hen\nno\na hat in the inn\n")
    return tmp_path


def run(command: str, *arguments: str) -> Any:
    """One call of a command; its refusals are raised."""
    return raising(COMMANDS[command], *arguments, "--device", "cpu")


def content(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    found.pop("command", None)
    return found


def test_perplexity_is_the_same_to_the_last_digit(folder: Path) -> None:
    run(*EVALUATE, "-o", "whole.json")
    made = run(*EVALUATE, *SPILL, "-o", "layers.json")
    said = r"model: Went through the layers once: [\d.]+ KiB of weights read, .* a second\."
    assert re.search(said, made.stderr)
    assert content("whole.json") == content("layers.json")
    names = {path.name for path in folder.iterdir()}
    assert names == {"data", "layers.json", "model", "text.txt", "whole.json"}


@pytest.mark.parametrize("model_type", ["m2m_100", "nllb-moe"])
def test_importance_of_a_translator_is_the_same_within_rounding(model_type: str, folder: Path) -> None:
    if model_type == "nllb-moe":
        tiny_nllb_moe(folder / "translator", pickled=True, shards=3)
    else:
        tiny_family(folder / "translator", model_type)
    arguments = ("score-heads", "translator", "--data", "data")
    run(*arguments, "-o", "whole.json")
    run(*arguments, *SPILL, "-o", "layers.json")
    whole, layers = content("whole.json"), content("layers.json")
    sums, wanted = layers.pop("values"), whole.pop("values")
    assert whole == layers
    assert sums.keys() == wanted.keys()
    for name, values in wanted.items():
        assert sums[name] == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize(
    ("command", "room"), [(EVALUATE, 20_000), (GRADIENT, 60_000)], ids=["evaluate", "score-heads"]
)
def test_groups_and_a_file(
    command: tuple[str, ...], room: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.Room, "in_memory", lambda _self, _plan: 0)
    monkeypatch.setattr(runner, "disk_room", lambda _directory: room)
    made = run(*command, "--memory", "8GiB")
    assert re.search(r"Went through the layers.* in \d+ groups: .*KiB of states in a file\.", made.stderr)


@pytest.mark.parametrize(
    ("command", "more", "said", "error"),
    [
        (
            ("evaluate", "model", "--task", "translation"),
            SPILL,
            r"--memory goes with --task mlm or lm, not translation",
            UsageError,
        ),
        (GRADIENT, (*SPILL, "--metric", "ablation"), r"--memory goes with --metric gradient", UsageError),
        (GRADIENT, ("--spill-dir", "."), r"--spill-dir goes with --memory", UsageError),
        (EVALUATE, ("--memory", "much"), "--memory much: not a size", UsageError),
        (EVALUATE, ("--memory", "1MiB"), r"too little: the smallest that works is [\d.]+[MG]iB", UsageError),
        (GRADIENT, ("--memory", "8GiB", "--spill-dir", "nowhere"), r"nowhere: cannot hold", OutputError),
    ],
)
def test_bad_input_is_said_plainly(
    command: tuple[str, ...], more: tuple[str, ...], said: str, error: type[PruneError], folder: Path
) -> None:
    with pytest.raises(error, match=said) as caught:
        run(*command, *more)
    assert caught.value.remedy
    assert not list(folder.glob("*.json"))


@pytest.mark.parametrize("command", [EVALUATE, GRADIENT], ids=["evaluate", "score-heads"])
def test_a_shard_that_vanishes_in_mid_pass(
    command: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "model" / "model.safetensors"
    real, left = StateStore.put, [3]

    def put(self: StateStore, *args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.truncate(file, 5_000)
        return real(self, *args)

    monkeypatch.setattr(StateStore, "put", put)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated while it was read"):
        run(*command, *SPILL)
    assert {path.name for path in folder.iterdir()} == {"data", "model", "text.txt"}


def test_an_interrupt_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[StateStore] = []
    real = StateStore.close
    monkeypatch.setattr(StateStore, "close", lambda self: (closed.append(self), real(self)))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LayerPasses, "forget_before", interrupted)
    run(*EVALUATE, *SPILL)
    assert len(closed) == 1
    assert {path.name for path in folder.iterdir()} == {"data", "model", "text.txt"}


MEASURED = """
import sys
from prunecli.commands.app import main
from prunecli.evaluation.hardware import peak_resident
try:
    main()
finally:
    print(f"peak {peak_resident()}", file=sys.stderr)
"""
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
}


@pytest.mark.parametrize("command", [GRADIENT, GATES], ids=["score-heads", "gates"])
def test_the_whole_process_stays_within_it(command: tuple[str, ...], folder: Path) -> None:
    """Of a model of 192 MiB in float32; two or three of its layers of 16 MiB are held. Of a mixture of 260 MiB."""
    if command == GATES:
        tiny_nllb_moe(folder / "wide", d_model=256, ffn=1024, experts=32, dtype="F16")
    else:
        tiny_family(folder / "wide", "llama", dtype="F16", **WIDE)

    def measured(memory: str) -> tuple[int, str, str]:
        arguments = (command[0], "wide", *command[2:], "--compute-dtype", "float32", "--memory", memory)
        (done,) = ended(start(folder, *arguments, code=MEASURED, processes=1))
        return done

    named = re.search(r"works is ([\d.]+)MiB", measured("1MiB")[2])
    assert named
    budget = int(float(named[1])) + 32
    status, _, err = measured(f"{budget}MiB")
    assert status == 0, err
    peak = re.search(r"peak (\d+)", err)
    assert peak
    assert int(peak[1]) < budget << 20
