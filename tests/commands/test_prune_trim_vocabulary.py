from pathlib import Path

import pytest

from prunecli.model.checkpoint import open_model
from prunecli.text.tokens import load_tokenizer
from tests.commands.calls import names, refusals
from tests.commands.vocabulary import done, run
from tests.contracts.method_contract import digests
from tests.families import tiny_family
from tests.tiny import tiny_nllb_moe, write_files

TEXTS = {
    "train.eng_Latn": "the hat\na hen\n",
    "val.eng_Latn": "on the tin\n\n",
    "test.eng_Latn": "the end\n",
    "train.deu_Latn": "ein hut\neine henne\n",
    "val.deu_Latn": "ohne\n\n",
    "test.deu_Latn": "ende\n",
}


@pytest.fixture(scope="module")
def model(shared_path):
    return tiny_nllb_moe(shared_path / "tiny", vocab=70)


@pytest.fixture(autouse=True)
def _text():
    write_files("data", TEXTS)


def test_trims_to_the_text(model):
    done(model, "--data data --langs eng_Latn --text data/test.deu_Latn").shows(
        "Written: trimmed-vocabulary (opens only where prunecli is installed: ",
        "All 4 different texts fall into the same tokens as before.",
    )
    out = Path("trimmed-vocabulary")
    more = {"README.md", "modeling_prunecli.py", "prunecli_decisions.json"}
    assert {*names(out)} == {*names(model)} | more
    new = load_tokenizer(out)
    opened = open_model(out)
    full = open_model(model)
    opened.check()
    assert opened.config["vocab_size"] == len(new) < full.config["vocab_size"] == 70
    step = opened.structure.history[-1]
    assert step["source"]["fingerprint"] == full.fingerprint
    read = {"split": ["train", "val"], "langs": ["eng_Latn"], "text": ["test.deu_Latn"]}
    assert step["arguments"] == {**read, "min_count": 1}
    assert (step["vocabulary"]["before"], step["vocabulary"]["after"]) == (70, len(new))
    assert step["vocabulary"]["sentences"] == 4
    assert str(Path.cwd()) not in (out / "config.json").read_text() + (out / "README.md").read_text()


def test_without_anything_the_demo_is_trimmed():
    result = done("--dry-run --json --langs qna_Latn,qno_Latn")
    assert "using the bundled demo model" in result.err
    assert '"val"' in result.out  # not its train, in which every token occurs
    assert '"train"' not in result.out
    assert names() == ["data"]


def test_dry_run_writes_nothing_and_shows_what_would_stay(model):
    before = digests(Path())
    result = done(model, "--data data --dry-run --min-count 2 --multiple-of 8 --dtype float16")
    assert digests(Path()) == before
    result.shows(
        "special and added",
        "tokens",
        "parameters",
        "of the running tokens are kept",
        "Dry run",
        "fall into other tokens",
    )


def test_tokens_asked_for_stay(model):
    Path("keep").write_text("\u2581the\nin\n\n", encoding="utf-8")
    done(model, "--text data/val.deu_Latn --keep keep --quiet")
    assert load_tokenizer(Path("trimmed-vocabulary")).tokenize("the in") == ["\u2581the", "\u2581", "in"]


def test_files_that_would_be_wrong_are_left_out_and_named():
    source = tiny_family("model", "gpt2")
    (source / "vocab.bpe").write_text("#version: 0.2\n")
    (source / "chat_template.jinja").write_text("x")
    assert "vocab.bpe is left out" in done(source, "--text data/val.eng_Latn").err
    written = names("trimmed-vocabulary")
    assert "vocab.bpe" not in written
    assert "chat_template.jinja" in written


@refusals(
    ("", "No text is given"),
    ("--text data/val.eng_Latn --langs eng_Latn", "--split and --langs go with --data"),
    ("--data data --langs eng_Latn,", "an empty name"),
    ("--data data --keep nowhere", "nowhere: no such file", 1),
    ("--data data --keep data/val.eng_Latn", "the tokenizer has no token 'on the tin'", 1),
    ("--data data --min-count 0", "--min-count"),
    ("--data data --multiple-of 0", "--multiple-of"),
)
def test_refusals(refusal, model):
    before = digests(Path())
    refusal(run, model)
    assert digests(Path()) == before
    assert names() == ["data"]
