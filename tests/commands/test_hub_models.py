"""Models of the hub as CHECKPOINT of the commands and of recipes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from prunecli.commands.command import parameters
from prunecli.commands.evaluate import evaluate
from prunecli.commands.finetune import finetune
from prunecli.commands.inspect import inspect
from prunecli.commands.measure import collect_gates
from prunecli.commands.prune import prune_experts, prune_heads, prune_layers, trim_vocabulary
from prunecli.commands.run import report, run
from prunecli.commands.share import factorize_embeddings, share_ffn
from prunecli.model.checkpoint import open_model
from prunecli.tensors import transaction
from prunecli.tensors.hub.fetch import commit_of
from tests.commands.calls import call, done, refusals, refused
from tests.contracts.method_contract import digests
from tests.hub_server import MAIN_COMMIT, hub
from tests.sentence_model import sentence_model
from tests.tiny import change_config, json_of, tiny_nllb_moe, write_files

__all__ = ["hub"]

TEXT = "--data data --split test --langs eng_Latn,fra_Latn"
CPU = "--device cpu"
OTHER_COMMIT = "b" * 40

COMMANDS = {
    "collect-gates": (collect_gates, f"{TEXT} {CPU}"),
    "prune-experts": (prune_experts, "--metric random --ratio 0.5"),
    "prune-heads": (prune_heads, "--metric random --ratio 0.5"),
    "prune-layers": (prune_layers, "--metric last --count 1"),
    "trim-vocabulary": (trim_vocabulary, TEXT),
    "factorize-embeddings": (factorize_embeddings, "--map-dim 8 --epochs 1"),
    "evaluate": (evaluate, f"{TEXT} {CPU} --beam 1 --max-new-tokens 2 --bootstrap 0"),
}


@pytest.fixture(autouse=True)
def _model_and_text(monkeypatch, hub):
    monkeypatch.setenv("SACREBLEU", "no-spm")
    write_files("data", {"test.eng_Latn": "the hat\nno\n" * 10, "test.fra_Latn": "le chapeau\nnon\n" * 10})
    hub.add("org/tiny", tiny_nllb_moe("source"))


def test_a_fault_of_a_file_names_the_model_not_the_cache(hub):
    change_config("source", d_model=18)
    hub.add("org/tiny", Path("source"), OTHER_COMMIT, "v2")
    command, options = COMMANDS["prune-heads"]
    found = call(command, "org/tiny@v2", options)
    refused(found, "org/tiny@bbbbbbb: ", 1)
    assert "models--" not in found.err


def test_two_models_and_a_teacher(hub):
    hub.add("org/tiny", tiny_nllb_moe("other", seed=1), OTHER_COMMIT, "v2")
    _, options = COMMANDS["evaluate"]
    done(evaluate, "org/tiny org/tiny@v2", options).shows("org/tiny@1a2b3c4", "org/tiny@bbbbbbb")
    training = f"{TEXT} {CPU} --valid-split test --steps 1 --batch-tokens 100"
    done(finetune, "org/tiny@v2 --teacher org/tiny", training, "-o taught")
    step = json_of("taught/config.json")["prunecli"]["history"][-1]
    assert step["source"]["revision"] == OTHER_COMMIT
    assert step["arguments"]["teacher"]["revision"] == MAIN_COMMIT


@pytest.mark.parametrize("name", ["prune-heads", "factorize-embeddings", "evaluate", "collect-gates"])
def test_an_output_that_exists_is_refused_before_anything_is_fetched(hub, name):
    command, options = COMMANDS[name]
    Path("taken").mkdir()
    refused(call(command, "org/tiny", options, "-o taken"), "taken: ", 1)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["prune-experts", "trim-vocabulary"])
def test_an_output_in_the_place_of_a_directory_overlaps_it_and_one_named_like_the_hub_does_not(name):
    command, options = COMMANDS[name]
    refused(call(command, "source", options, "-o source"), "source: overlaps the checkpoint source", 1)
    done(command, "org/tiny", options, "-o org --dry-run")


@refusals(
    ("org/none", "org/none: no such directory here, and no such model", 1),
    ("org/tiny@v9", "no branch, tag or commit v9", 1),
    ("./org/tiny", "org/tiny: no such directory\n", 1),
    ("data/tiny", "data/tiny: no such directory\ndata is a directory here", 1),
    ("tiny", "tiny: no such directory\nGive a checkpoint directory, or a model of the hub as org/name.", 1),
)
def test_names_that_lead_nowhere(refusal):
    refusal(call, inspect)


def test_inspect_names_the_model_and_what_to_type_next(hub):
    found = done(inspect, "org/tiny --fit 600KiB")
    assert found.out.startswith("org/tiny@1a2b3c4: nllb-moe, float32, model.safetensors")
    assert "disk" not in found.out
    found = call(inspect, "org/tiny --json")
    assert found.json["models"][0]["revision"] == MAIN_COMMIT
    assert hub.fetched().count("model.safetensors") == 2  # its header, each time


RECIPE = """
variables: {model: org/tiny}
steps:
  - name: prune
    command: prune-experts
    arguments: {checkpoint: "${model}", metric: random, ratio: "0.5", output: out/pruned}
  - name: again
    command: prune-heads
    arguments: {checkpoint: out/pruned, metric: random, ratio: "0.5", output: out/fewer}
"""


def _in_this_process(step, replace):
    """Do what a step's own process would do."""
    command, _ = COMMANDS[step.command]
    words = [word for word in step.arguments if word != "--"]
    return call(command, *words, *(["--force"] if replace else [])).status


def test_a_recipe_knows_a_model_by_its_commit(hub, monkeypatch):
    monkeypatch.setattr("prunecli.commands.run._execute", _in_this_process)
    Path("recipe.yaml").write_text(RECIPE)
    done(run, "recipe.yaml")
    call(run, "recipe.yaml").says("prune: up to date", "again: up to date")
    hub.add("org/tiny", tiny_nllb_moe("other", seed=1), OTHER_COMMIT)
    commit_of.cache_clear()
    assert "up to date" not in call(run, "recipe.yaml").err
    config = json_of("out/fewer/config.json")
    assert config["prunecli"]["history"][0]["source"]["revision"] == OTHER_COMMIT


def test_a_recipe_takes_only_checkpoints_from_the_hub(hub):
    Path("recipe.yaml").write_text(RECIPE.replace("metric: random", "gates: [org/gates]", 1))
    refused(call(run, "recipe.yaml --dry-run"), "input org/gates does not exist")
    Path("recipe.yaml").write_text(RECIPE)
    as_path = call(run, "recipe.yaml --dry-run --set model=./org/tiny")
    refused(as_path, f"its input {Path('org/tiny').resolve()} does not exist")
    assert hub.requests == []


def test_every_checkpoint_of_a_command_may_be_of_the_hub():
    named = {(command, name): one for command, own in parameters().items() for name, one in own.items()}
    roles = {names for names, parameter in named.items() if parameter.role == "checkpoint"}
    others = "bench-latency compare-models finetune inspect prune-ffn report score-heads shrink"
    shares = ("share-attention", "share-ffn")
    assert {command for command, _ in roles} == {*COMMANDS, *shares, *others.split()}
    assert {("finetune", "teacher"), ("compare-models", "other"), ("compare-models", "benchmarks")} <= roles


def test_an_original_of_a_report_may_be_of_the_hub():
    command, options = COMMANDS["prune-heads"]
    Path("made").mkdir()
    done(command, "source", options, "-o made/less")
    done(report, "made --original org/tiny -o page.html")
    assert ">tiny<" in Path("page.html").read_text()


SCRIPT = """
import sys
from prunecli.commands.app import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print("huggingface_hub" in sys.modules)
"""


def test_the_environment_is_huggingface_hubs_and_a_directory_does_not_import_it(hub):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(Path("home").resolve()), "HF_TOKEN": "hf_secret"}
    for name, imported in (("source", "False"), ("org/tiny", "True")):
        line = f"prune-experts {name} --metric random --ratio 0.5 -o {name[:3]}.out"
        command = [sys.executable, "-c", SCRIPT, *line.split()]
        made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert made.stdout.splitlines()[-1] == imported
        assert bool(hub.requests) == (name == "org/tiny")
    assert f"into {Path('home/hub').resolve()}" in made.stderr
    assert "%|" not in made.stderr  # no bar outside of a terminal
    assert "hf_secret" not in made.stderr


@pytest.mark.parametrize("name", ["prune-experts", "prune-layers", "trim-vocabulary"])
def test_streaming_gives_what_fetching_gives_and_says_what_came(name):
    command, options = COMMANDS[name]
    options += " org/tiny"
    lines = call(command, options, "--stream -o streamed").err.splitlines()
    assert any(line.startswith("Streaming org/tiny at 1a2b3c4 from ") for line in lines)
    assert re.fullmatch(r"Fetched .* KiB of .* KiB, in \d+ requests\.", lines[-1])
    assert not list(Path().glob("cache/**/*.safetensors"))
    call(command, options, "-o local")
    assert digests("streamed") == digests("local")
    assert "is in the cache and read from there" in call(command, options, "--stream --dry-run").err


def test_a_model_that_is_to_run_is_not_streamed(hub):
    refused(call(prune_layers, "org/tiny", TEXT, "--stream"), "which needs all of its weights")
    assert hub.requests == []


def test_streaming_says_what_aimer_fetches():
    said = call(prune_experts, "org/tiny --metric aimer --stream --dry-run").err
    assert re.search(r"aimer fetches [\d.]+ KiB of experts to rank them; kept experts are fetched", said)


@refusals(
    ("source --stream", "source is a path"),
    ("org/none --stream", "no such model on", 1),
)
def test_what_cannot_be_streamed_is_refused(refusal):
    refusal(call, prune_experts, "--metric random")


# A sentence-transformers model of the hub's cache through a command: modules, name and text go along.


HASH = "0123456789abcdef0123456789abcdef01234567"
SOURCE = Path("models--org--tiny-sentences") / "snapshots" / HASH
CARD = "---\nlicense: mit\nlibrary_name: sentence-transformers\nbase_model: org/before\n---\n\n# tiny\n\nMaps text.\n"


@pytest.fixture
def sentences():
    sentence_model(SOURCE)
    (SOURCE / "README.md").write_text(CARD)
    (SOURCE / "onnx").mkdir()
    (SOURCE / "onnx" / "model.onnx").write_text("weights of another format")
    (SOURCE / "tf_model.h5").write_text("weights of another format")
    Path("text.txt").write_text("the hen\nin the nest\na tin hat\n" * 4)


def test_modules_go_along(sentences):
    result = done(trim_vocabulary, SOURCE, "--text text.txt -o out")
    assert result.err.count("Left out, as no part of the model: onnx/, tf_model.h5\n") == 1
    out = Path("out")
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        assert (out / name).read_bytes() == (SOURCE / name).read_bytes()
    modules = ["1_Pooling", "2_Dense"]
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == modules
    for name in modules:
        assert digests(out / name) == digests(SOURCE / name)
    made = open_model(out)
    assert made.structure.history[0]["source"]["path"] == "org/tiny-sentences"
    assert made.structure.history[0]["source"]["revision"] == HASH
    card = (out / "README.md").read_text()
    matter = yaml.safe_load(card.split("---\n")[1])
    assert (matter["base_model"], matter["library_name"]) == ("org/tiny-sentences", "sentence-transformers")
    assert "# org/tiny-sentences, pruned\n" in card
    assert card.endswith("\n# Original model card\n\n# tiny\n\nMaps text.\n")
    dry = done(trim_vocabulary, SOURCE, "--text text.txt --dry-run --json")
    assert dry.json["left_out"] == ["onnx/", "tf_model.h5"]
    assert "Left out" not in call(trim_vocabulary, SOURCE, "--text text.txt --dry-run --quiet").err


def test_room_is_asked_for_what_goes_along(sentences, monkeypatch):
    (SOURCE / "2_Dense" / "extra.bin").write_bytes(b"x" * 3_000_000)
    usage = type("Usage", (), {"free": transaction.SPARE_BYTES + 2_000_000})
    monkeypatch.setattr(transaction.shutil, "disk_usage", lambda _path: usage)
    refused(call(prune_heads, SOURCE, "--metric random -o out"), "MiB are needed", 1)


@pytest.mark.parametrize(("name", "need"), [("BertForMaskedLM", "cls.predictions"), ("BertModel", None)])
def test_a_class_that_the_tensors_do_not_allow_is_said(sentences, name, need):
    change_config(SOURCE, architectures=[name])
    result = done(share_ffn, SOURCE, "--preset SharedEnc -o out")
    assert (f"config.json names {name}, but there is no tensor {need}" in result.err) == (need is not None)
    assert ("Warning" in result.err) == (need is not None)
