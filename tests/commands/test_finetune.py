import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import M2M100ForConditionalGeneration

import prunecli
from prunecli.commands.finetune import finetune
from prunecli.commands.prune import prune_heads
from prunecli.commands.share import factorize_embeddings, share_ffn
from prunecli.model.checkpoint import open_model
from prunecli.training.options import TrainingOptions
from prunecli.training.state import sole_writer
from prunecli.training.trainer import with_dtype
from tests.commands import calls
from tests.commands.calls import both, names, refusals, refused
from tests.contracts.method_contract import digests
from tests.families import tiny_config_of, tiny_family
from tests.tiny import change_config, config_of, json_of, write_json, write_tokenizer
from tests.training.runs import lines, signalled, write_parallel

SMALL = "--batch-tokens 100 --steps 4 --eval-every 2 --warmup 1 --device cpu"
PLAIN = "--text data/train.eng_Latn --valid-text data/val.eng_Latn"
PAIR = "--data data --pairs eng_Latn-fra_Latn"
USUAL = f"{PAIR} {SMALL} -o out"


@pytest.fixture(autouse=True)
def _model_and_text():
    tiny_family("model", "m2m_100", dtype="F16")
    write_parallel("data", train=40, val=8)


run, done = both(finetune)


def values(path):
    checkpoint = open_model(path)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def shapes(checkpoint):
    return {name: info.shape for name, info in checkpoint.tensors.items()}


def test_a_checkpoint_is_trained():
    result = done("model", USUAL)
    result.shows(
        "Validation",
        "4 updates",
        "\nA stock model: plain transformers opens it.\n",
        "Written: out (stock layout), figures in out.finetune.json",
    )
    assert "step 2: " in result.err
    assert not Path("out.training").exists()
    before = open_model("model")
    after = open_model("out")
    assert dict(before.tensors) == dict(after.tensors)  # float16 as it was stored
    step = after.structure.history[-1]
    assert step["command"] == "finetune"
    assert step["source"] == {"path": "model", "fingerprint": before.fingerprint}
    assert after.structure.is_stock
    kept = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"}
    assert kept <= {*names("out")}
    old, new = values("model"), values("out")
    assert sum(not np.array_equal(old[name], new[name]) for name in old) > len(old) / 2  # in float16
    figures = json_of("out.finetune.json")
    assert figures["format"] == "prunecli.finetune/1"
    assert [row["step"] for row in figures["validation"]] == [0, 2, 4]
    assert figures["tokens_per_second"] > 0
    assert "lm_head.weight" not in new


def test_json_is_the_file():
    result = done("model", USUAL, "--json --quiet --dtype float32")
    assert result.json == json_of("out.finetune.json")
    assert result.err == ""
    made = open_model("out")
    assert {info.dtype for info in made.tensors.values()} == {"F32"}
    assert made.config["dtype"] == "float32"


def test_from_scratch():
    Path("config").mkdir()
    size = write_tokenizer(Path("config"))
    config = {key: value for key, value in tiny_config_of("m2m_100").items() if key != "vocab_size"}
    write_json("config/config.json", config)
    done("--from-scratch config", USUAL)
    made = open_model("out")
    assert made.model_type == "m2m_100"
    assert made.config["vocab_size"] == size
    arguments = made.structure.history[-1]["arguments"]
    assert arguments["from_scratch"] == "m2m_100"
    assert arguments["learning_rate"] == 7e-4
    stock = M2M100ForConditionalGeneration.from_pretrained("out")
    own = prunecli.load_model("out", device="cpu")
    for (name, one), (_, other) in zip(stock.named_parameters(), own.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    done("--from-scratch config", PAIR, SMALL, "-o again")
    first, again = (Path(name, "model.safetensors").read_bytes() for name in ("out", "again"))
    assert first == again


@pytest.mark.parametrize(
    ("command", "choice"),
    [
        (share_ffn, "--preset OneWide"),
        (prune_heads, "--metric random --ratio 0.4"),
        (factorize_embeddings, "--map-dim 8 --expand-dim 16 --depth 1"),
    ],
)
def test_a_reduced_model_from_scratch(command, choice):
    tiny_family("equal", "m2m_100", decoder_ffn_dim=48)
    for more in ("-o reduced", "--config-only -o config"):
        calls.done(command, "equal", choice, more)
    assert {*names("config")} == {*names("reduced")} - {"model.safetensors"}
    assert "finetune --from-scratch" in Path("config/README.md").read_text()
    done("--from-scratch config", PAIR, SMALL, "--learning-rate 0.01 --eval-every 1", "-o out")
    reduced = open_model("reduced")
    made = open_model("out")
    assert dict(made.layout.shapes) == dict(reduced.layout.shapes)
    assert shapes(made) == shapes(reduced)
    steps = made.structure.history
    assert replace(made.structure, history=()) == replace(reduced.structure, history=())
    assert [step["command"] for step in steps] == [reduced.structure.history[0]["command"], "finetune"]
    assert all("source" not in step for step in steps)  # what was measured on the original is not of this one
    assert steps[-1]["arguments"]["from_scratch"] == "m2m_100"
    assert "Trained with prunecli from random weights." in Path("out/README.md").read_text()
    losses = [row["loss"] for row in json_of("out.finetune.json")["validation"]]
    assert losses[-1] < losses[0]
    assert prunecli.load_model("out", device="cpu").config.model_type == "m2m_100"


@pytest.mark.parametrize("reduced", [False, True])
def test_random_weights_that_the_memory_cannot_hold_are_refused(reduced):
    tiny_family("full", "m2m_100")
    if reduced:
        calls.done(prune_heads, "full --metric random --ratio 0.4 --config-only -o config")
    else:
        shutil.copytree("full", "config")
    change_config("config", encoder_ffn_dim=1 << 38)
    result = run("--from-scratch config", USUAL)
    refused(result, "config/config.json: its model of ", 1)
    assert re.search(r"of [\d,]{15,} parameters takes", result.err)
    assert not Path("out").exists()


def test_a_config_of_a_damaged_history_from_scratch():
    tiny_family("full", "m2m_100")
    calls.done(prune_heads, "full --metric random --ratio 0.4 --config-only -o config")
    change_config("config", prunecli={**config_of("config")["prunecli"], "history": "."})
    refused(run("--from-scratch config", USUAL), 'config.json: the value under "prunecli" is damaged', 1)
    assert not Path("out").exists()


def test_the_tokenizer_of_another_directory():
    write_json("config.json", {**tiny_config_of("m2m_100"), "vocab_size": 80})
    done("--from-scratch config.json --tokenizer model", USUAL)
    assert Path("out/tokenizer.json").is_file()


def test_a_classifier():
    tiny_family("bert", "bert-classifier")
    for name, seed, count in (("train", 0, 40), ("valid", 1, 8)):
        rows = [f"{'hen' in line.split():d}\t{line}\n" for line in lines(count, seed)]
        Path(f"{name}.tsv").write_text("".join(rows))
    done("bert", "--labelled train.tsv --valid-labelled valid.tsv", SMALL, "-o out --json")
    figures = json_of("out.finetune.json")
    assert figures["arguments"]["task"] == "classification"
    assert len(figures["validation"]) == 3
    shutil.copytree("bert", "other")
    change_config("other", "num_labels", id2label={"0": "LABEL_1", "1": "LABEL_0", "2": "LABEL_2"})
    taught = run("bert --teacher other --labelled train.tsv", SMALL, "-o other-out")
    refused(taught, "the teacher's id2label is {0: 'LABEL_1', ")


def test_an_interrupt_says_how_to_go_on(monkeypatch):
    with signalled(monkeypatch, signal.SIGINT):
        result = run("model", USUAL)
    assert result.status == 130
    result.says("Stopped after step 3", "the same command resumes")
    assert not Path("out").exists()
    assert "Resuming from step 3" in done("model", USUAL).err


def test_a_second_run_of_an_output_is_told_of_the_first():
    with sole_writer(Path("out")):
        refused(run("model", USUAL), f"Error: out: another run trains it now (process {os.getpid()})\n", 1)
        assert not Path("out.training").exists()
    done("model", USUAL)
    assert not list(Path().glob(".out*"))


def test_another_checkpoint_and_other_files_are_named():
    tiny_family("other", "m2m_100", dtype="F16", seed=7)
    done("model", USUAL, "--keep-state")
    refused(run("other", USUAL, "--force"), "the checkpoint was model, now it is other")
    Path("moved").mkdir()
    for path in Path("data").iterdir():
        path.rename(Path("moved", path.name.replace("train", "more")))
    moved = run("model", USUAL, "--data moved --split more --max-sentences 39 --force")
    refused(moved, "was train.eng_Latn, train.fra_Latn, now it is more")


@refusals(
    (f"model {PAIR} --temperature nan", "--temperature nan: must be a finite number"),
    (f"model --from-scratch model {PAIR}", "--from-scratch does not go with CHECKPOINT"),
    ("model --text data/train.eng_Latn", "feature-extraction, not translation"),
    ("gpt2 --text data/train.eng_Latn --measure chrf++", "--measure chrf++"),
    (f"gpt2 {PAIR} --task translation", "no head for it", 1),
    (f"model {PAIR} --split dev", "no split 'dev'", 1),
    ("gpt2 --text data/train.eng_Latn --split dev", "--split does not go with --text"),
    ("gpt2 --text data/train.eng_Latn --patience 1", "--patience needs text to validate with"),
    (f"model {PAIR} --batch-tokens 100 --steps 4 --keep-at 2,5", "--keep-at: the run ends after 4 updates"),
    (f"model {PAIR} --batch-tokens 9999", "less than one update", 1),
    (f"model {PAIR} -o model", "overlaps", 1),
    (f"model {PAIR} -o figures", "figures.finetune.json: exists", 1),
    (f"--from-scratch odd.json {PAIR}", '"odd" is not supported', 1),
    (f"--from-scratch narrow.json --tokenizer model {PAIR}", "vocab_size is 5"),
    (f"--from-scratch heads.json --tokenizer model {PAIR}", "cannot make", 1),
    (
        f"--from-scratch shared.json --tokenizer gpt2 {PLAIN}",
        '8, no multiple of "num_key_value_heads", 255',
        1,
    ),
    (f"--from-scratch plain {PAIR}", "Name one with --tokenizer", 1),
    (f"--from-scratch torn {PAIR}", "torn: no tokenizer could be loaded", 1),
)
def test_refused(refusal):
    tiny_family("gpt2", "gpt2", vocab_size=90)
    Path("figures.finetune.json").write_text("{}")
    config = tiny_config_of("m2m_100", vocab_size=80)
    write_json("odd.json", {"model_type": "odd"})
    write_json("narrow.json", {**config, "vocab_size": 5})
    sizes = tiny_config_of("llama", vocab_size=90, num_key_value_heads=255)
    shared = {key: value for key, value in sizes.items() if not key.endswith("_token_id")}
    write_json("shared.json", shared)
    write_json("heads.json", {**config, "encoder_attention_heads": 5})
    for name in ("plain", "torn"):
        Path(name).mkdir()
        write_json(f"{name}/config.json", config)
    Path("torn/tokenizer.json").write_text("{")
    before = digests(".")
    refusal(run, "--device cpu -o out")
    assert digests(".") == before
    assert not Path("out.training").exists()


def test_a_fault_of_another_process_alone_is_said(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(run("model --data none", SMALL, "-o out"), "none: no such directory", 1)


def test_the_demo_without_arguments():
    """An empty folder gives the demo model and its text."""
    done("--steps 1 --max-sentences 50 --max-valid 5 --batch-tokens 500 -o out").says(
        "using the bundled demo model", "using the demo's text"
    )
    assert Path("out/model.safetensors").is_file()


@pytest.mark.parametrize(("capability", "dtype"), [((7, 0), "float32"), ((8, 0), "bfloat16")])
def test_a_gpu_that_only_emulates_bfloat16_trains_in_float32(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
    assert with_dtype(TrainingOptions()).dtype == dtype
    assert with_dtype(TrainingOptions(dtype="bfloat16")).dtype == "bfloat16"
