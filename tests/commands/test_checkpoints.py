"""The checkpoints that are taken where none is named, in a working directory that holds other things too."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from prunecli import demo
from prunecli.commands.checkpoints import checkpoint_or_demo, checkpoints_or_demo, demo_text, texts_or_demo
from prunecli.commands.evaluate import evaluate
from prunecli.commands.measure import score_heads
from prunecli.model.checkpoint import open_model
from prunecli.running.layerwise.states import StateStore
from prunecli.text.files import TextFile
from tests.commands.calls import call, names, refusals, refused
from tests.families import tiny_family
from tests.forked import ended, start
from tests.tiny import tiny_nllb_moe, write_files, write_json


def checkpoint(name: str, config: Any) -> Path:
    Path(name).mkdir()
    write_json(f"{name}/config.json", config)
    return Path(name)


def pruned(name: str, original: Path = demo.CHECKPOINT) -> Path:
    source = {"path": "x", "fingerprint": open_model(original).fingerprint}
    return checkpoint(name, {"prunecli": {"history": [{"source": source}, {"source": {"fingerprint": "y"}}]}})


def test_nothing_given_is_the_demo_and_what_was_pruned_here(capsys):
    assert checkpoints_or_demo(None) == [demo.CHECKPOINT]
    assert capsys.readouterr().err == "No checkpoint given: using the bundled demo model.\n"
    pruned("b")
    pruned("a")
    checkpoint("mine", {"prunecli": {"history": [{"source": {"fingerprint": "y"}}]}})
    checkpoint("stock", {"model_type": "bert"})
    checkpoint("list", ["prunecli"])
    Path("damaged").mkdir()
    Path("damaged/config.json").write_bytes(b"\xff{")
    assert checkpoints_or_demo([]) == [demo.CHECKPOINT, Path("a"), Path("b")]
    assert "using the bundled demo model with a, b." in capsys.readouterr().err
    assert checkpoints_or_demo([Path("stock")]) == [Path("stock")]
    assert capsys.readouterr().err == ""


def test_the_language_model_stands_beside_language_models_alone(capsys):
    pruned("a", demo.LM_CHECKPOINT)
    pruned("b")
    assert checkpoints_or_demo(None, "lm") == [demo.LM_CHECKPOINT, Path("a")]
    assert capsys.readouterr().err == "No checkpoint given: using the bundled language model with a.\n"
    assert checkpoints_or_demo(None) == [demo.CHECKPOINT, Path("b")]
    assert checkpoint_or_demo(None, "lm") == demo.LM_CHECKPOINT
    assert checkpoint_or_demo(Path("a"), "lm") == Path("a")


def test_the_text_of_the_language_model_is_taken_where_none_is_named(capsys):
    own = (TextFile(Path("x")),)
    assert texts_or_demo(own, "lm", "val", None) == own
    assert texts_or_demo(None, "translation", "val", None) == ()
    assert capsys.readouterr().err == ""
    taken = texts_or_demo(None, "lm", "val", None)
    assert taken == tuple(TextFile(demo.LM_DATA / f"val.{name}", name) for name in demo.LM_TEXTS)
    assert "No `files` given: using the demo's text, prose and code" in capsys.readouterr().err


def test_the_text_of_a_demo_is_for_its_model_and_those_made_from_it_alone():
    shutil.copytree(demo.CHECKPOINT, "copy")
    mine = checkpoint("mine", {"prunecli": {"history": [{"source": {"fingerprint": "y"}}]}})
    made, lm = pruned("made"), pruned("lm", demo.LM_CHECKPOINT)
    for named in (None, [], demo.CHECKPOINT, Path("copy"), [made, demo.CHECKPOINT]):
        assert demo_text(named) == demo.DATA
    for named in (mine, [made, mine], lm, demo.LM_CHECKPOINT, Path("org/name")):
        assert demo_text(named) is None
    assert demo_text([lm], "lm") == demo.LM_DATA
    assert texts_or_demo(None, "lm", "val", [lm]) == texts_or_demo(None, "lm", "val", None)
    assert texts_or_demo(None, "lm", "val", [mine]) == ()


COMMANDS = {"evaluate": evaluate, "score-heads": score_heads}
LM = "model --task lm --text text.txt --batch-tokens 20"
EVALUATE, GRADIENT = f"evaluate {LM}", f"score-heads {LM}"
GATES = "collect-gates model --data data"
SPILL = "--memory 8GiB --spill-dir ."


@pytest.fixture
def memory_folder(monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # which the command would set for good
    tiny_family("model", "gpt2")
    Path("text.txt").write_text("the hat\nno\nten hens in the inn\n" + "the tin " * 60 + "\n")
    write_files("data", dict.fromkeys(("val.eng_Latn", "val.fra_Latn"), "the hen\nno\na hat in the inn\n"))


def run(line: str) -> Any:
    command, _, arguments = line.partition(" ")
    return call(COMMANDS[command], arguments, "--device cpu")


@refusals(
    (f"{EVALUATE} --memory much", "--memory much: not a size"),
    (f"{EVALUATE} --memory 1MiB", "too little: the smallest that works is "),
    (f"{GRADIENT} --memory 8GiB --spill-dir nowhere", "nowhere: cannot hold", 1),
)
def test_bad_input_is_said_plainly(refusal, memory_folder):
    refusal(run)
    assert not list(Path().glob("*.json"))


@pytest.mark.parametrize("command", [EVALUATE, GRADIENT])
def test_a_shard_that_vanishes_in_mid_pass(command, memory_folder, monkeypatch):
    file = Path("model/model.safetensors")
    real, left = StateStore.put, [3]

    def put(self, *args):
        left[0] -= 1
        if left[0] == 0:
            os.truncate(file, 5_000)
        return real(self, *args)

    monkeypatch.setattr(StateStore, "put", put)
    refused(run(f"{command} {SPILL}"), "model.safetensors: truncated while it was read", 1)
    assert names() == ["data", "model", "text.txt"]


MEASURED = """
import sys
from prunecli.commands.app import main
from prunecli.evaluation.latency import peak_resident
try:
    main()
finally:
    print(f"peak {peak_resident()}", file=sys.stderr)
"""
WIDE = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12}


@pytest.mark.parametrize("command", [GRADIENT, GATES])
def test_the_whole_process_stays_within_it(command, memory_folder):
    """A model of 108 MiB in float32, two or three of whose layers of 9 MiB are held; a mixture of 260 MiB."""
    if command == GATES:
        tiny_nllb_moe("wide", d_model=256, ffn=1024, experts=32, dtype="F16")
    else:
        tiny_family("wide", "llama", dtype="F16", **WIDE)

    def measured(memory):
        line = f"{command.replace('model', 'wide')} --compute-dtype float32 --memory {memory}"
        (done,) = ended(start(line, code=MEASURED, processes=1))
        return done

    named = re.search(r"works is ([\d.]+)MiB", measured("1MiB")[2])
    budget = int(float(named[1])) + 32
    status, _, err = measured(f"{budget}MiB")
    assert status == 0, err
    peak = re.search(r"peak (\d+)", err)
    assert int(peak[1]) < budget << 20
