"""A sentence-transformers model of the hub's cache through each command: modules, name and text go along."""

import json
from pathlib import Path

import pytest
import yaml

from prunecli.commands.prune import prune_heads, trim_vocabulary
from prunecli.commands.share import share_ffn
from prunecli.model.checkpoint import open_model
from prunecli.tensors import transaction
from tests.commands.calls import call, done
from tests.sentence_model import sentence_model
from tests.tiny import config_of, json_of, write_json

HASH = "0123456789abcdef0123456789abcdef01234567"
SOURCE = Path("models--org--tiny-sentences") / "snapshots" / HASH
CARD = "---\nlicense: mit\nlibrary_name: sentence-transformers\nbase_model: org/before\n---\n\n# tiny\n\nMaps text.\n"
TEXT = ("--text", "text.txt")
REWRITING = [
    (prune_heads, ("--metric", "random", "--ratio", 0.3)),
    (share_ffn, ("--preset", "SharedEnc")),
    (trim_vocabulary, TEXT),
]


@pytest.fixture
def folder(tmp_path):
    sentence_model(SOURCE)
    (SOURCE / "README.md").write_text(CARD)
    (SOURCE / "onnx").mkdir()
    (SOURCE / "onnx" / "model.onnx").write_text("weights of another format")
    (SOURCE / "tf_model.h5").write_text("weights of another format")
    Path("text.txt").write_text("the hen\nin the nest\na tin hat\n" * 4)
    return tmp_path


def check(out: Path) -> None:
    modules = json_of(out / "modules.json")
    assert modules == json_of(SOURCE / "modules.json")
    for module in modules[1:]:
        before, after = (
            {path.name: path.read_bytes() for path in (place / module["path"]).glob("*")}
            for place in (SOURCE, out)
        )
        assert before == after, module
    for name in ("sentence_bert_config.json", "config_sentence_transformers.json"):
        assert (out / name).read_bytes() == (SOURCE / name).read_bytes()
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"1_Pooling", "2_Dense"}
    pooling = config_of(out / "1_Pooling")
    with open_model(out) as made:
        assert pooling["word_embedding_dimension"] == made.config["hidden_size"]
        assert made.structure.history[0]["source"]["path"] == "org/tiny-sentences"
        assert made.structure.history[0]["source"]["revision"] == HASH


@pytest.mark.parametrize(("command", "options"), REWRITING, ids=lambda value: getattr(value, "__name__", ""))
def test_modules_go_along(folder, command, options):
    result = done(command, SOURCE, *options, "-o", "out")
    assert result.err.count("Left out, as no part of the model: onnx/, tf_model.h5\n") == 1
    check(Path("out"))
    card = Path("out/README.md").read_text()
    matter = yaml.safe_load(card.split("---\n")[1])
    assert (matter["base_model"], matter["library_name"]) == ("org/tiny-sentences", "sentence-transformers")
    assert "# org/tiny-sentences, pruned\n" in card
    assert card.endswith("\n# Original model card\n\n# tiny\n\nMaps text.\n")
    dry = done(command, SOURCE, *options, "--dry-run", "--json")
    assert json.loads(dry.out)["left_out"] == ["onnx/", "tf_model.h5"]
    assert "onnx/, tf_model.h5" in dry.err
    assert "Left out" not in call(command, SOURCE, *options, "--dry-run", "--quiet").err


def test_room_is_asked_for_what_goes_along(folder, monkeypatch):
    (SOURCE / "2_Dense" / "extra.bin").write_bytes(b"x" * 3_000_000)
    usage = type("Usage", (), {"free": transaction.SPARE_BYTES + 2_000_000})
    monkeypatch.setattr(transaction.shutil, "disk_usage", lambda _path: usage)
    result = call(prune_heads, SOURCE, "--metric", "random", "-o", "out")
    assert result.status == 1
    assert "MiB are needed" in result.err


@pytest.mark.parametrize(("name", "need"), [("BertForMaskedLM", "cls.predictions"), ("BertModel", None)])
def test_a_class_that_the_tensors_do_not_allow_is_said(folder, name, need):
    config = config_of(SOURCE)
    write_json(SOURCE / "config.json", {**config, "architectures": [name]})
    result = done(share_ffn, SOURCE, "--preset", "SharedEnc", "-o", "out")
    assert (f"config.json names {name}, but there is no tensor {need}" in result.err) == (need is not None)
    assert ("Warning" in result.err) == (need is not None)
