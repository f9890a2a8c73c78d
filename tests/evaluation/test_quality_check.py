"""What rewriting commands say of the quality of their result: before and after, on a little text."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from transformers import MPNetModel

from prunecli.commands.prune import prune_ffn, prune_heads, prune_layers, trim_vocabulary
from prunecli.commands.share import share_attention, share_ffn
from prunecli.model.checkpoint import open_model
from prunecli.modules import fitting
from tests.commands.calls import call, done, refusals
from tests.evaluation.losses import losses
from tests.families import tiny, tiny_family
from tests.tiny import write_files, write_plain_tokenizer

LINES = ("the hen", "ten tins on", "then no hen")


@pytest.fixture(autouse=True)
def _text():
    names = ("text.txt", "val.eng_Latn", "val.fra_Latn", "test.eng_Latn", "test.fra_Latn")
    write_files(".", dict.fromkeys(names, "".join(f"{line}\n" for line in LINES)))
    Path("text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))


def loss_of(path: Path, texts: Sequence[str]) -> float:
    nats, tokens = losses(path, texts)
    return nats.sum() / tokens.sum()


def quality(command: Callable[..., None], *arguments: object) -> dict:
    return done(command, *arguments, "--json").json["quality"]


def test_losses_are_those_of_the_models(models):
    found = quality(prune_ffn, models["llama"], "--text text.jsonl")
    assert (found["measure"], found["text"], found["text_of_scores"]) == ("loss", ["text.jsonl"], True)
    for key, path in (("before", models["llama"]), ("after", Path("pruned-ffn"))):
        assert found[key] == pytest.approx(loss_of(path, LINES), abs=1e-4)
    assert found["count"] == losses(path, LINES)[1].sum()
    assert not found["ruined"]


@pytest.mark.parametrize(
    ("command", "case", "arguments"),
    [
        (prune_ffn, "bert", "--metric random"),
        (prune_layers, "bert", "--remove 1"),
        (prune_heads, "llama", "--metric random"),
        (share_ffn, "m2m_100", ""),
        (share_attention, "m2m_100", ""),
        (trim_vocabulary, "llama", "--text text.txt"),
    ],
)
def test_every_command_checks_on_request(command, case, arguments, models):
    assert "Loss on" not in done(command, models[case], arguments, "-o without").out
    text = "." if case == "m2m_100" else "text.txt"
    result = done(command, models[case], arguments, f"--check {text} -o out")
    assert "Loss on" in result.out
    assert "(perplexity " in result.out


@pytest.mark.parametrize(
    ("head", "labels", "line"),
    [
        ("BertModel", 2, "Vectors of 3 texts of text.txt: mean cosine to the original's 0."),
        ("BertForSequenceClassification", 2, "Classes of 3 texts of text.txt: "),
        ("BertForSequenceClassification", 1, "Vectors of 3 texts of text.txt: mean cosine"),
    ],
)
def test_outputs_are_compared_with_the_original(head, labels, line):
    model = tiny_family("model", "bert", architectures=[head], num_labels=labels)
    assert line in done(prune_layers, model, "--remove 0,1 --check text.txt").out


def test_lines_are_texts_of_found_encoders_too():
    model = Path("model")
    tiny.drawn(MPNetModel, tiny.tiny_config("mpnet")).save_pretrained(model)
    write_plain_tokenizer(model)
    line = "Vectors of 3 texts of text.txt: mean cosine"
    assert line in done(prune_layers, model, "--remove 1 --check text.txt").out


@refusals(
    ("--dry-run", "--check does not go with --dry-run"),
    ("--config-only", "--check does not go with --config-only"),
    ("--check absent", "absent", 1),
)
def test_refusals(refusal, models):
    refusal(call, prune_heads, models["llama"], "--metric random --check text.txt")
    assert not Path("pruned-heads").exists()


def test_a_model_that_does_not_fit_is_pruned_unmeasured(models, monkeypatch):
    monkeypatch.setattr(fitting, "new_memory", lambda _device: 1000)
    result = done(prune_heads, models["llama"], "--metric random --check text.txt")
    assert "The quality of the result is not measured: " in result.err
    open_model("pruned-heads").check()


def test_text_that_gave_no_scores_comes_first(models):
    behind = quality(prune_ffn, models["llama"], "--text text.jsonl --max-sentences 2")
    assert not behind["text_of_scores"]
    assert behind["before"] == pytest.approx(loss_of(models["llama"], LINES[2:]), abs=1e-4)
    parallel = "--data . --pairs eng_Latn-fra_Latn --encoder 1"
    found = quality(prune_layers, models["m2m_100"], parallel)
    assert (found["text"], found["text_of_scores"]) == (["test"], False)
    Path("test.eng_Latn").unlink()
    Path("test.fra_Latn").unlink()
    found = quality(prune_layers, models["m2m_100"], parallel, "--force")
    assert (found["text"], found["text_of_scores"]) == (["val"], True)


def test_all_language_pairs_are_measured(models):
    both = ("eng_Latn-fra_Latn", "fra_Latn-eng_Latn")
    counts = []
    for pairs in (*both, ",".join(both)):
        options = f"--data . --pairs {pairs} --encoder 1 --force"
        counts.append(quality(prune_layers, models["m2m_100"], options)["count"])
    assert counts[2] == counts[0] + counts[1]
