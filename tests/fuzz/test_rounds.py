"""A few rounds of what `benchmarks/reliability.py` does many of, and the faults that it has found."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prunecli.commands import app
from prunecli.errors import CheckpointError, DataError, OutputError, PruneError
from prunecli.model.checkpoint import open_model
from prunecli.recipes.engine import read_recipe
from prunecli.results.gates import read_gates
from prunecli.results.unit_scores import Scores, read_scores
from prunecli.tensors.directory import read_config
from prunecli.tensors.json_files import read_json
from prunecli.tensors.transaction import new_file, refuse_unwritable, write_json
from prunecli.text.files import read_lines
from prunecli.text.plain import read_labelled
from prunecli.text.tokens import load_tokenizer, tokenized
from tests.commands.calls import names
from tests.families import tiny_family
from tests.fuzz.hostile import RECIPES
from tests.fuzz.mutations import (
    damage_index,
    damage_json,
    damage_recipe,
    damage_safetensors,
    damage_text,
    damage_value,
)
from tests.fuzz.rounds import run
from tests.tiny import change_config, change_json, json_of, tiny_nllb_moe

FEW = settings(max_examples=40)
randoms = st.randoms(use_true_random=False)


@pytest.fixture(scope="module")
def moe(shared_path):
    return tiny_nllb_moe(shared_path / "moe", layers=2, experts=4, shards=2)


@FEW
@given(
    rng=randoms,
    target=st.sampled_from(
        ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors")
    ),
)
def test_a_damaged_checkpoint_opens_or_is_refused(moe, rng, target):
    path = moe / target
    whole = path.read_bytes()
    damage = {".safetensors": damage_safetensors}.get(path.suffix, damage_json)
    opens_or_is_refused(moe, path, (damage_index if "index" in target else damage)(whole, rng))


def opens_or_is_refused(model: Path, file: Path, damaged: bytes) -> None:
    whole = file.read_bytes()
    file.write_bytes(damaged)
    try:
        with suppress(PruneError), open_model(model) as checkpoint:
            checkpoint.check()
    finally:
        file.write_bytes(whole)


@FEW
@given(rng=randoms)
def test_a_damaged_structure_opens_or_is_refused(moe, rng):
    path = moe / "config.json"
    layers = [f"model.{side}.layers.1.ffn" for side in ("encoder", "decoder")]
    structure = {
        "version": 1,
        "experts": {layer: [0, 1, 2, 3] for layer in layers},
        "original_experts": dict.fromkeys(layers, 4),
        "heads": {"model.encoder.layers.0.self_attn": [0, 1]},
        "original_heads": {"model.encoder.layers.0.self_attn": 2},
        "ffn": {"model.encoder.layers.0.ffn": {"width": 32}},
        "embedding": {"output": {"map_dim": None, "tied": False}},
        "history": [{"command": "prune-experts", "source": {"path": "in", "fingerprint": "sha256:00"}}],
    }
    config = {**json_of(path), "prunecli": damage_value(structure, rng)}
    opens_or_is_refused(moe, path, json.dumps(config).encode())


SUMS = {"tokens": [2], "top1": [[1, 1]], "top2": [[1, 1]]}
SUMS |= {name: [[0.5, 1.5]] for name in ("gate_sum", "conf1_sum", "conf2_sum")}
OF = {"mode": "forced", "layers": ["a"], "num_experts": 2, "top_k": 2, "entries": {"a-b": SUMS}}
GATES = {"format": "prunecli.gates/1", "model": {"fingerprint": "x", "model_type": "nllb-moe"}, **OF}


@FEW
@given(rng=randoms, reader=st.sampled_from((read_gates, read_scores, read_json)))
def test_damaged_statistics_are_read_or_refused(tmp_path_factory, rng, reader):
    value = GATES
    if reader is read_scores:
        value = {**GATES, "format": "prunecli.heads/1", "method": "gradient", "task": "lm", "examples": 2}
        value |= {"heads": {"a": [0, 1]}, "sum": {"a": [0.5, 1.0]}}
        if rng.random() < 0.5:  # the present format
            value = Scores.from_json(value, Path()).to_json()
    path = tmp_path_factory.getbasetemp() / "statistics.json"
    path.write_bytes(damage_json(json.dumps(value).encode(), rng))
    with suppress(PruneError):
        reader(path)


@FEW
@given(rng=randoms)
def test_damaged_text_is_read_or_refused(tmp_path_factory, rng):
    path = tmp_path_factory.getbasetemp() / "text"
    path.write_bytes(damage_text("one\ttext\ntwo\ttéxt\n\nthree\ttext\n".encode(), rng))
    for reader in (read_lines, read_labelled):
        with suppress(DataError):
            reader(path)


@FEW
@given(rng=randoms)
def test_damaged_recipes_are_read_or_refused(tmp_path_factory, rng):
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_bytes(
        damage_recipe(b"steps:\n- name: a\n  command: inspect\n  arguments: {checkpoint: a}\n", rng)
    )
    with suppress(PruneError):
        read_recipe(path)


@pytest.mark.parametrize("text", RECIPES)
def test_hostile_recipes_run_nothing(text):
    Path("recipe.yaml").write_text(text)
    ran = run("run recipe.yaml --dry-run", limit_s=20)
    assert ran.status in (0, 2), ran.trace
    assert names() == ["recipe.yaml"]


# What longer runs have found.


OTHER_KINDS = (
    *(("t5", "dropout_rate", "a word"), ("opt", "dropout", 55)),
    *(("llama", "num_hidden_layers", 1e308), ("llama", "tie_word_embeddings", 1)),
    *(("gpt2", "n_layer", 0), ("gpt2", "n_head", 1 << 63), ("gpt2", "architectures", ["\ud800"])),
    *(("m2m_100", "pad_token_id", "a word"), ("m2m_100", "decoder_start_token_id", 1 << 31)),
)
RUNS = "score-heads model --text text -o out.json"
REWRITES = (
    "share-ffn model --preset OneWide -o out",
    "prune-heads model --metric random --ratio 0.5 -o out",
    "factorize-embeddings model --map-dim 4 --expand-dim 12 --max-groups 2 --epochs 0 -o out",
    "trim-vocabulary model --text text -o out",
)


@pytest.mark.parametrize(
    ("name", "key", "value", "command"),
    [
        pytest.param(*kind, command, id=f"{kind[0]}-{kind[1]}-{command.split()[0]}")
        for number, kind in enumerate(OTHER_KINDS)
        for command in (RUNS, REWRITES[number % 4], REWRITES[(number + 1) % 4])
    ],
)
def test_config_of_another_kind(name, key, value, command):
    change_config(tiny_family("model", name), **{key: value})
    Path("text").write_text("a hen\n")
    ran = run(command)
    assert ran.status in (0, 1, 2), ran.trace
    assert ran.status == 0 or not {"out", "out.json"} & set(names())


def test_text_that_no_file_can_hold_is_refused_early():
    Path("config.json").write_text('{"model_type": "\\ud800"}')
    with pytest.raises(CheckpointError, match="half a surrogate pair"):
        read_config(Path())
    Path("labelled").write_text('{"label": "a", "text": "\\ud800"}\n')
    with pytest.raises(DataError, match=r"line 1: .*half a surrogate pair"):
        read_labelled(Path("labelled"))


def test_numbers_that_json_lacks_are_refused_early():
    Path("config.json").write_text('{"prunecli": {"history": [NaN]}}')
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        read_config(Path())


def test_a_config_of_hundreds_of_levels_is_refused_early():
    for levels, text in ((100, "[" * 99 + "]" * 99), (101, "[" * 100 + "]" * 100)):
        Path("config.json").write_text(f'{{"a": {text}}}')
        with suppress(CheckpointError) if levels == 100 else pytest.raises(CheckpointError, match="levels"):
            assert read_config(Path())


def test_force_replaces_results_alone():
    os.mkfifo("pipe")
    Path("link").symlink_to("/dev/null")
    Path("text").write_text("a hen\n")
    Path("config.json").write_text('{"model_type": "llama"}')
    for name in ("pipe", "link", "text", "config.json"):
        with pytest.raises(OutputError, match="not a file" if name in ("pipe", "link") else "no result"):
            refuse_unwritable(Path(name), force=True)
    with pytest.raises(OutputError, match="not a file"):
        write_json("pipe", {}, force=True)
    with pytest.raises(OutputError, match="not a file"), new_file(Path("link")):
        pass
    for _ in range(2):
        refuse_unwritable(Path("gates.json"), force=True)
        write_json("gates.json", {"format": "prunecli.gates/2"}, force=True)
    assert names() == ["config.json", "gates.json", "link", "pipe", "text"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="other systems have no such device")
def test_json_on_a_full_disk_is_one_line():
    tiny_nllb_moe("model", layers=2)  # which takes no torch to inspect
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-m", "prunecli", "inspect", "model", "--json"]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stderr.splitlines()[0]) == (1, "Error: no space left on the disk.")


def test_names_of_files_that_no_text_can_hold_are_written_as_escapes():
    write_json("a.json", {"command": [os.fsdecode(b"\xff")]})
    assert json.loads(Path("a.json").read_bytes()) == {"command": ["\udcff"]}


@pytest.mark.parametrize("settings", [{"\ud800": 1}, {"chat_template": "\ud800"}])
def test_a_tokenizer_that_could_not_be_saved_is_refused(settings):
    model = tiny_family("model", "gpt2")
    change_json(model / "tokenizer_config.json", **settings)
    with pytest.raises(CheckpointError, match="half a surrogate pair"):
        load_tokenizer(model)


def test_a_panic_of_the_tokenizer_is_one_line():
    model = tiny_family("model", "gpt2")
    parts = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    change_json(model / "tokenizer.json", model={**parts, "continuing_subword_prefix": "long"})
    with pytest.raises(CheckpointError, match=r"no tokenizer could be loaded .PanicException"):
        load_tokenizer(model)


def test_a_tokenizer_that_fails_at_work_is_named():
    model = tiny_family("model", "gpt2")
    change_json(model / "tokenizer_config.json", model_max_length={})
    tokenizer = load_tokenizer(model)
    with pytest.raises(CheckpointError, match="model: the tokenizer does not work"):
        tokenized(tokenizer, ["a"], truncation=True)


def test_what_a_killed_process_left_of_a_file_goes_with_the_next_run():
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    Path(f".a.json.{process}.partial").write_text("{")
    Path(".a.json.partial").write_text("the state of a run that goes on")
    write_json("a.json", {})
    assert names() == [".a.json.partial", "a.json"]


def test_a_bug_is_one_line_without_debug(monkeypatch, capsys):
    monkeypatch.setattr(app, "_register", Mock(side_effect=ZeroDivisionError("a\nb")))
    with pytest.raises(SystemExit) as caught:
        app.main(["inspect"])
    assert caught.value.code == 70
    assert capsys.readouterr().err.splitlines() == [
        "Error: a fault in prunecli: ZeroDivisionError: a b",
        "Please report it with what --debug shows.",
    ]


def test_control_characters_and_endless_values_do_not_reach_the_terminal():
    model = tiny_nllb_moe("model", layers=2)
    for value in ("\x1b]0;title\x07", "x" * 100_000):
        change_config(model, model_type=value)
        ran = run("prune-heads model --metric random --ratio 0.5 -o out")
        assert ran.status == 1
        assert "\x1b" not in ran.err
        assert max(map(len, ran.err.splitlines())) < 1100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such signal")
def test_a_step_ends_with_the_run_that_was_killed():
    step = "import time; from prunecli import processes; processes.end_with_parent(); "
    step += "print('on', flush=True); time.sleep(60)"
    start = (
        "import os, subprocess, sys; from prunecli.processes import PARENT;"
        f"subprocess.Popen([sys.executable, '-c', {step!r}], env={{**os.environ, PARENT: str(os.getpid())}}).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "on\n"
        parent.kill()
        assert parent.stdout.read() == ""  # which comes when the step has ended, too
