"""`prunecli collect-gates --text`, typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prunecli.commands.collect_gates import collect_gates
from prunecli.commands.compare import compare_languages
from prunecli.commands.evaluate import evaluate
from prunecli.commands.prune import prune_experts
from prunecli.demo import LM_TEXTS
from prunecli.methods.experts.metrics import METRICS
from prunecli.results.gates import read_gates
from prunecli.text.plain import MIXED
from tests.commands.calls import Result, call, refused
from tests.stock_mixtures import TAPPED, tiny_images_model, tiny_mixture, write_sentinels
from tests.tiny import tiny_nllb_moe, write_plain_tokenizer

CHAT = {"messages": [{"role": "user", "content": "the hen"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_mixture("deepseek_v3").save_pretrained(path)
    write_plain_tokenizer(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prose.txt").write_text("the hen\na hat\nthe inn is on the tin\n")
    (tmp_path / "code.jsonl").write_text(json.dumps({"text": "if x:\n  y"}) + "\n")
    (tmp_path / "chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    (tmp_path / "none.jsonl").write_text(json.dumps({"text": ""}) + "\n")
    return tmp_path


def run(model: Path, *arguments: str) -> Result:
    return call(collect_gates, str(model), *arguments)


def test_texts_are_entries(model: Path, folder: Path) -> None:
    made = run(
        model,
        "--text",
        "prose.txt",
        "--text",
        "code=code.jsonl",
        "--text",
        "code=prose.txt",
        "--context",
        "8",
    )
    assert made.status == 0, made.err
    assert "experts without a token" in made.out
    found = read_gates(folder / "gates.json")
    assert (found.mode, found.top_k, list(found.entries)) == ("text", 2, ["prose", "code"])
    assert found.whole_files is True
    assert "Text: 2 files as whole documents (--lines takes each line as a text)." in made.err
    assert run(model, "--text", "prose.txt", "--lines", "-o", "lines.json").status == 0
    both = call(prune_experts, model, "--gates", "gates.json", "--gates", "lines.json", "--dry-run")
    assert MIXED in both.err
    assert MIXED in call(compare_languages, "gates.json", "lines.json").err
    assert found.layers == ("model.layers.1.mlp", "model.layers.2.mlp")
    assert found.entries["code"].tokens[0] > found.entries["prose"].tokens[0]
    assert (found.entries["prose"].routed.sum(axis=1) == 2 * found.entries["prose"].tokens).all()
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []


def test_no_more_tokens_than_asked(model: Path, folder: Path) -> None:
    assert run(model, "--text", "prose.txt", "--text", "code.jsonl", "--max-tokens", "5").status == 0
    assert [int(sums.tokens[0]) for sums in read_gates(folder / "gates.json").entries.values()] == [5, 5]


def test_layer_by_layer_the_file_is_the_same(model: Path, folder: Path) -> None:
    assert run(model, "--text", "prose.txt", "--compute-dtype", "float32").status == 0
    held = json.loads((folder / "gates.json").read_text())
    made = run(model, "--text", "prose.txt", "--compute-dtype", "float32", "--memory", "4GiB", "--force")
    assert made.status == 0, made.err
    assert "Went through the layers once" in made.err
    assert json.loads((folder / "gates.json").read_text())["entries"] == held["entries"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Give --text NAME=FILE"),
        (("--context", "8"), "--context goes with --text"),
        (("--text", "prose.txt", "--mode", "beam"), "--mode goes with models that translate"),
        (("--text", "prose.txt", "--max-sentences", "2"), "--max-sentences goes with models that translate"),
        (
            ("--text", "prose.txt", "--memory", "1MiB"),
            "--memory 1MiB is too little: the smallest that works is",
        ),
        (("--text", "prose.txt", "--context", "65"), "the model has 64 positions"),
        (("--text", "chat.jsonl"), "chat 1: the model's tokenizer has no chat template"),
        (("--text", "empty=none.jsonl"), "no token in the text 'empty'"),
        (("--text", "gone.txt"), "gone.txt: no such file"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    model: Path, folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    made = run(model, *arguments)
    assert made.status in (1, 2)
    assert message in made.err
    assert "Traceback" not in made.err
    assert not (folder / "gates.json").exists()


@pytest.mark.parametrize("model_type", [*TAPPED, "llama4"])
def test_every_metric_works_of_families_that_are_tapped(folder: Path, model_type: str) -> None:
    made = tiny_images_model() if model_type == "llama4" else tiny_mixture(model_type, vocab_size=80)
    made.save_pretrained(folder / "model")
    write_sentinels(folder / "model")
    collected = run(folder / "model", "--text", "prose.txt", "--text", "chat=prose.txt")
    assert collected.status == 0, collected.err
    for metric in METRICS:
        pruned = call(
            prune_experts,
            folder / "model",
            "--metric",
            metric,
            "--for",
            "prose",
            "-o",
            metric,
            "--ratio",
            "0.5",
        )
        assert pruned.status == 0, pruned.err
    assert (
        "is measured with the whole model in memory"
        in run(folder / "model", "--text", "prose.txt", "--memory", "1GiB", "--force").err
    )


def test_text_for_a_model_that_translates_is_refused(folder: Path) -> None:
    tiny_nllb_moe(folder / "nllb")
    refused(run(folder / "nllb", "--text", "prose.txt"), "--text goes with language models", 2)


def test_the_demos_language_model_needs_no_arguments(folder: Path) -> None:
    collected = call(collect_gates, "--demo", "lm", "--max-tokens", "300")
    assert collected.status == 0, collected.err
    assert list(read_gates(folder / "gates.json").entries) == list(LM_TEXTS)
    pruned = call(prune_experts, "--demo", "lm", "--for", "code", "--ratio", "0.5", "-o", "for-code")
    assert pruned.status == 0, pruned.err
    evaluated = call(evaluate, "--demo", "lm", "--max-sentences", "6")
    assert evaluated.status == 0, evaluated.err
    full, reduced = json.loads((folder / "evaluation.json").read_text())["results"]
    assert (full["checkpoint"], reduced["checkpoint"]) == ("demo-lm", "for-code")
    lost = {name: reduced["by_text"][name]["loss"] - full["by_text"][name]["loss"] for name in LM_TEXTS}
    assert lost["prose"] > 3 * lost["code"]
    without = call(collect_gates, "--demo", "translation", "--context", "8", "--force")
    assert without.status == 2
    assert "--context goes with --text" in without.err
