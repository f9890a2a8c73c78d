import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli import processes
from prunecli.commands import console
from prunecli.commands.compare import compare_languages
from prunecli.commands.evaluate import evaluate
from prunecli.commands.measure import collect_gates
from prunecli.commands.prune import prune_experts
from prunecli.demo import LM_TEXTS
from prunecli.methods.experts import collect
from prunecli.methods.experts.metrics import METRICS
from prunecli.methods.options import ExpertOptions
from prunecli.model.checkpoint import open_model
from prunecli.model.cost import weight_bytes
from prunecli.modules import fitting
from prunecli.modules.devices import Devices
from prunecli.processes import ProcessGroup
from prunecli.results.gates import read_gates
from prunecli.text.plain import MIXED
from tests.commands.calls import both, call, content, names, refusals, refused
from tests.contracts.method_contract import made_of
from tests.forked import ended, start
from tests.stock_mixtures import TAPPED, save_mixture, tiny_images_model, tiny_mixture, write_sentinels
from tests.tiny import json_of, tiny_nllb_moe, write_files

MODEL = "model --data text"
LINES = "the hen\na hat\nno\nthe inn is on the tin\nhat and hen\n"


@pytest.fixture
def folder():
    tiny_nllb_moe("model", pickled=True, shards=3)
    write_files("text", dict.fromkeys(("val.eng_Latn", "val.fra_Latn", "val.deu_Latn"), LINES))


run, done = both(collect_gates)


def test_all_pairs_of_the_text(folder):
    assert "eng_Latn-fra_Latn" in done("model --data text").out
    found = read_gates("gates.json")
    assert len(found.entries) == 6
    assert found.mode == "forced"
    assert names() == ["gates.json", "model", "text"]
    raw = json_of("gates.json")
    assert raw["format"] == "prunecli.gates/1"
    assert raw["models"][0]["path"] == "model"


def test_what_lies_in_the_place_of_the_partial_result_does_not_fail_a_whole_one(folder):
    Path(".gates.json.partial").mkdir()
    done("model --data text --max-sentences 1")
    read_gates("gates.json")


@refusals(
    ("text --data text", "config.json", 1),
    ("model --data text --pairs eng_Latn", "eng_Latn"),
    ("model --source-file text/val.eng_Latn", "--target-file"),
    (f"{MODEL} --memory 4GiB --mode beam", "--mode beam needs the whole model"),
    (f"{MODEL} --memory 4GiB --spill-dir nowhere", "nowhere", 1),
)
def test_bad_input_is_said_plainly(refusal, folder):
    refusal(run)
    assert not Path("gates.json").exists()


@pytest.fixture(scope="module")
def model(shared_path):
    return save_mixture(shared_path / "tiny", "deepseek_v3")


@pytest.fixture
def text_folder():
    Path("prose.txt").write_text("the hen\na hat\nthe inn is on the tin\n")
    Path("code.jsonl").write_text(json.dumps({"text": "if x:\n  y"}) + "\n")
    Path("chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "the hen"}]}))


def test_texts_are_entries(model, text_folder):
    texts = "--text=prose.txt --text=code=code.jsonl --text=code=prose.txt"
    made = done(model, texts, "--context 8")
    assert "experts without a token" in made.out
    found = read_gates("gates.json")
    assert (found.mode, found.top_k, list(found.entries)) == ("text", 2, ["prose", "code"])
    assert found.whole_files is True
    assert "Text: 2 files as whole documents (--lines takes each line as a text)." in made.err
    done(model, "--text prose.txt --lines -o lines.json")
    call(prune_experts, model, "--gates gates.json --gates lines.json --dry-run").says(MIXED)
    assert MIXED in call(compare_languages, "gates.json lines.json").err
    assert found.layers == ("model.layers.1.mlp", "model.layers.2.mlp")
    assert found.entries["code"].tokens[0] > found.entries["prose"].tokens[0]
    assert (found.entries["prose"].routed.sum(axis=1) == 2 * found.entries["prose"].tokens).all()
    assert not any(name.startswith(".") for name in names())


@refusals(
    ("", "Give --text NAME=FILE"),
    ("--context 8", "--context goes with --text"),
    ("--text prose.txt --mode beam", "--mode goes with models that translate"),
    ("--text prose.txt --memory 1MiB", "--memory 1MiB is too little: the smallest"),
    ("--text chat.jsonl", "chat 1: the model's tokenizer has no chat template", 1),
)
def test_what_cannot_be_is_refused_in_a_line(refusal, model, text_folder):
    refusal(run, model)
    assert not Path("gates.json").exists()


@pytest.mark.parametrize("model_type", [*TAPPED, "llama4"])
def test_every_metric_works_of_families_that_are_tapped(text_folder, model_type):
    made = tiny_images_model() if model_type == "llama4" else tiny_mixture(model_type, vocab_size=80)
    made.save_pretrained("model")
    write_sentinels("model")
    done("model --text prose.txt --text chat=prose.txt")
    gates = read_gates("gates.json")
    checkpoint = open_model("model")
    for metric in METRICS:
        chosen = ExpertOptions(gates=gates, metric=metric, texts=("prose",), ratio=0.5)
        assert made_of(checkpoint, chosen).outputs
    run("model --text prose.txt --memory 1GiB --force").says("is measured with the whole model in memory")


def test_text_for_a_model_that_translates_is_refused(text_folder):
    tiny_nllb_moe("nllb")
    refused(run("nllb --text prose.txt"), "--text goes with language models")


def test_the_demos_language_model_needs_no_arguments(text_folder):
    done("--demo lm --max-tokens 300")
    assert list(read_gates("gates.json").entries) == list(LM_TEXTS)
    call(prune_experts, "--demo lm --for code --ratio 0.5 -o for-code")
    call(evaluate, "--demo lm --max-sentences 6")
    full, reduced = json_of("evaluation.json")["results"]
    assert (full["checkpoint"], reduced["checkpoint"]) == ("demo-lm", "for-code")
    lost = {name: reduced["by_text"][name]["loss"] - full["by_text"][name]["loss"] for name in LM_TEXTS}
    assert lost["prose"] > 3 * lost["code"]
    refused(call(collect_gates, "--demo translation --context 8 --force"), "--context goes with --text")


def test_the_file_is_the_same_but_for_the_command_line(folder):
    arguments = "model --data text --batch-tokens 20"
    done(arguments, "-o whole.json")
    made = done(arguments, "--memory 4GiB --spill-dir . -o layers.json")
    assert re.search(r"Went through the layers once: .* of weights read, .* a second\.", made.err)
    assert content("whole.json") == content("layers.json")
    assert names() == ["layers.json", "model", "text", "whole.json"]


def chosen(free: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(collect, "free_memory", lambda _device: free)
    monkeypatch.setattr(fitting, "new_memory", lambda _device: free)
    group = ProcessGroup(0, processes.world_size())
    return collect.memory_for(
        open_model("model"), Devices(torch.device("cpu")), torch.float32, group, console.note
    )


def test_one_that_does_not_is_run_by_layers(folder, monkeypatch, capsys):
    assert chosen(10_000, monkeypatch) == 8_000
    assert "it is run layer by layer, in 7.81 KiB" in capsys.readouterr().err


def test_several_on_one_machine_share_what_is_free(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(ProcessGroup, "all_gather", lambda _group, value: [value])
    assert chosen(10_000, monkeypatch) == 4_000
    free = weight_bytes(open_model("model"), "F32") * 3 // 2
    assert chosen(free, monkeypatch) is not None
    assert chosen(2 * free, monkeypatch) is None


def test_beam_search_on_one_that_does_not_is_refused(folder, monkeypatch):
    monkeypatch.setattr(fitting, "new_memory", lambda _device: 100_000)
    made = run("model --data text --mode beam --device cpu")
    refused(made, "needs ", 1)
    assert "on the CPU in bfloat16 (weights " in made.err


# Bad endings of `collect-gates` by several processes, as torchrun starts them.


SENTENCES = "the hen\na\nno hen on the hat\nten\nthe inn\nthe hat is in the inn\n"
ARGUMENTS = "model --data data --langs eng_Latn,fra_Latn --batch-tokens 16"
GATES = f"collect-gates {ARGUMENTS}"
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
def shared_folder():
    tiny_nllb_moe("model", experts=16)
    write_files("data", dict.fromkeys(("val.eng_Latn", "val.fra_Latn"), SENTENCES))


def alone(*more: str) -> str:
    """Notes of the run by one process."""
    return done(ARGUMENTS, *more).err


def left() -> set[str]:
    return {*names()}.difference(("model", "data", "waiting"))


def test_one_that_is_killed_ends_the_other_and_one_alone_goes_on(shared_folder):
    first, second = ended(start("kill 1 3", GATES, code=DRIVER))
    assert (first[0], first[1], second[0]) == (1, "", -signal.SIGKILL)
    assert "process 0 of 2 stops: " in first[2]
    assert "Kept in .gates.json.partial: the same command resumes from it." in first[2]
    assert left() == {".gates.json.partial"}
    assert "Resuming from .gates.json.partial: 4 batches are done." in alone()
    assert left() == {"gates.json"}
    assert "Resuming" not in alone("-o one.json")
    assert content("gates.json") == content("one.json")


def test_control_c_ends_all(shared_folder):
    """The terminal, or torchrun, hands the signal to each."""
    processes = start("wait 1 3", GATES, code=DRIVER)
    deadline = time.monotonic() + 60
    while not Path("waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        os.kill(process.process.pid, signal.SIGINT)
    first, second = ended(processes)
    assert 0 not in (first[0], second[0])
    assert first[1] == second[1] == ""
    assert "Kept in .gates.json.partial: the same command resumes from it." in first[2]
    assert left() == {".gates.json.partial"}
    assert "Resuming from .gates.json.partial" in alone()
