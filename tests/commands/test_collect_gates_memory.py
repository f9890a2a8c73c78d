"""`prunecli collect-gates --memory`, typed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli import processes
from prunecli.commands import console
from prunecli.commands.collect_gates import collect_gates
from prunecli.methods.experts import collect
from prunecli.model.checkpoint import open_model
from prunecli.model.cost import weight_bytes
from prunecli.modules import fitting
from prunecli.modules.devices import Devices
from prunecli.processes import ProcessGroup
from tests.commands.calls import Result, call, refused
from tests.tiny import tiny_nllb_moe

LINES = ["the hen", "a hat", "no", "the inn is on the tin", "hat and hen"]
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_nllb_moe(tmp_path / "model", pickled=True, shards=3)
    (tmp_path / "text").mkdir()
    for language in ("eng_Latn", "fra_Latn", "deu_Latn"):
        (tmp_path / "text" / f"val.{language}").write_text("\n".join(LINES) + "\n")
    return tmp_path


def run(*arguments: str) -> Result:
    return call(collect_gates, *arguments)


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    found.pop("command")
    return found


def test_the_file_is_the_same_but_for_the_command_line(folder: Path) -> None:
    arguments = ("model", "--data", "text", "--batch-tokens", "20")
    assert run(*arguments, "-o", "whole.json").status == 0
    made = run(*arguments, "--memory", "4GiB", "--spill-dir", ".", "-o", "layers.json")
    assert made.status == 0, made.err
    assert re.search(r"Went through the layers once: .* of weights read, .* a second\.", made.err)
    assert content(folder / "whole.json") == content(folder / "layers.json")
    assert sorted(path.name for path in folder.iterdir()) == ["layers.json", "model", "text", "whole.json"]


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (("--memory", "4GiB", "--mode", "beam"), "--mode beam needs the whole model", 2),
        (("--memory", "much"), "--memory much: not a size", 2),
        (("--memory", "4GiB", "--spill-dir", "nowhere"), "nowhere", 1),
    ],
)
def test_bad_input_is_said_plainly(folder: Path, arguments: tuple[str, ...], said: str, status: int) -> None:
    refused(run("model", "--data", "text", *arguments), said, status)
    assert not (folder / "gates.json").exists()


def chosen(folder: Path, free: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(collect, "free_memory", lambda _device: free)
    monkeypatch.setattr(fitting, "new_memory", lambda _device: free)
    group = ProcessGroup(0, processes.world_size())
    with open_model(folder / "model") as checkpoint:
        return collect.memory_for(
            checkpoint,
            Devices(CPU),
            torch.float32,
            group,
            console.note,
        )


def test_a_model_that_fits_is_held_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(folder, 10**9, monkeypatch) is None


def test_one_that_does_not_is_run_by_layers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen(folder, 10_000, monkeypatch) == 8_000
    assert "it is run layer by layer, in 7.81 KiB" in capsys.readouterr().err


def test_several_on_one_machine_share_what_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(ProcessGroup, "all_gather", lambda _group, value: [value])
    assert chosen(folder, 10_000, monkeypatch) == 4_000
    free = weight_bytes(open_model(folder / "model"), "F32") * 3 // 2
    assert chosen(folder, free, monkeypatch) is not None
    assert chosen(folder, 2 * free, monkeypatch) is None


def test_beam_search_on_one_that_does_not_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "new_memory", lambda _device: 100_000)
    made = run("model", "--data", "text", "--mode", "beam")
    refused(made, "needs ", 1)
    assert "on the CPU in bfloat16 (weights " in made.err


def test_a_search_that_goes_on_keeps_its_type(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of two types would be added, where more memory is free the second time."""
    arguments = ("model", "--data", "text", "--mode", "beam", "--batch-tokens", "8", "--beam", "2")
    arguments = (*arguments, "--pairs", "eng_Latn-fra_Latn", "--max-sentences", "3")
    assert run(*arguments, "-o", "whole.json", "--compute-dtype", "bf16").status == 0
    monkeypatch.setattr(fitting, "free_for_each", lambda *_: 0)
    monkeypatch.setattr(fitting, "candidates", lambda *_, **__: (torch.bfloat16,))
    monkeypatch.setattr(fitting.Need, "fits", lambda *_: True)
    save = collect.PartialRun.save

    def stop(partial_run: collect.PartialRun, state: Any) -> None:
        save(partial_run, state)
        if state.batches == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(collect.PartialRun, "save", stop)
        assert run(*arguments).status != 0
    assert (folder / ".gates.json.partial").exists()
    monkeypatch.setattr(
        fitting, "candidates", lambda name, *_, **__: (torch.float32 if name == "auto" else torch.bfloat16,)
    )
    assert "2 batches are done" in run(*arguments).err
    found, whole = content(folder / "gates.json"), content(folder / "whole.json")
    assert found["dtype"] == "bfloat16"
    assert found == whole
