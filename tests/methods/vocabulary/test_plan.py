"""From text to the trimmed tokenizer, of every kind: nothing is written, and what would be wrong is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import Unigram

from prunecli.errors import CheckpointError, UnsupportedModelError
from prunecli.methods.vocabulary import plan as plan_module
from prunecli.methods.vocabulary.plan import (
    Text,
    VocabularyOptions,
    check_same,
    load_trimmed,
    plan_vocabulary,
    select_tokens,
)
from prunecli.methods.vocabulary.tokenizer import Vocabulary, read_model
from prunecli.model.checkpoint import open_model
from prunecli.selection.cut import Selection, cut
from prunecli.text.choice import Lines
from prunecli.text.plain import PlainText
from prunecli.text.tokens import load_tokenizer
from tests.families import tiny_family
from tests.methods.vocabulary.makers import END, KINDS, SEEN, TEXT, sentencepiece_model
from tests.tiny import VOCAB, change_config, config_of, write_json


def trimmed(source: Path, lines: tuple[str, ...] = SEEN, **options: Any) -> Selection:
    return plan_vocabulary(open_model(source), Lines(lines, (), (), (), None), VocabularyOptions(**options))


def new_tokenizer(source: Path, made: Selection) -> Any:
    files = {path.name: path.read_bytes() for path in source.iterdir() if path.suffix != ".safetensors"}
    files.update({name: data for name, data in made.files.items() if data is not None})
    return load_trimmed(files, config_of(source))


@pytest.fixture(scope="module")
def sources(shared_path):
    return {name: maker(shared_path / name) for name, maker in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.sampled_from(" ".join(TEXT).split()), min_size=1, max_size=12), sign=st.text(max_size=3)
)
def test_any_text_falls_into_the_same_tokens(kind, sources, words, sign):
    line = " ".join([*words, sign]).replace("\n", " ").replace("\r", " ") or "a"
    made = trimmed(sources[kind], (line,))
    old, new = load_tokenizer(sources[kind]), new_tokenizer(sources[kind], made)
    assert old.tokenize(line) == new.tokenize(line)
    assert [made.kept["tokens"][number] for number in new(line)["input_ids"]] == old(line)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_rare_tokens_fall_into_smaller_ones(kind, sources):
    full, fewer = trimmed(sources[kind]), trimmed(sources[kind], min_count=3)
    assert set(fewer.kept["tokens"]) < set(full.kept["tokens"])
    compared = fewer.details["compared"]
    assert 0 < fewer.details["text"]["share_kept"] < 1
    assert compared["changed"] > 0
    old, new = load_tokenizer(sources[kind]), new_tokenizer(sources[kind], fewer)
    if kind not in ("word_level", "unigram"):
        for line in SEEN:
            assert new.decode(new(line)["input_ids"]) == old.decode(old(line)["input_ids"])


def config_after(source: Path, **changes: Any) -> tuple[Selection, dict[str, Any]]:
    opened = open_model(source)
    opened.config |= changes
    made = plan_vocabulary(opened, Lines(SEEN, (), (), (), None), VocabularyOptions())
    return made, cut(opened, made).config


def test_ids_of_the_config_move_with_their_tokens(sources):
    source = sources["byte_bpe"]
    made, config = config_after(source, pad_token_id=5, eos_token_id=-1)
    assert config["vocab_size"] == len(made.kept["tokens"])
    assert made.kept["tokens"][config["pad_token_id"]] == 5
    assert config["eos_token_id"] == -1
    assert made.kept["tokens"][-1] == load_tokenizer(source).convert_tokens_to_ids(END)


def test_ids_left_to_the_class_are_written_out_where_they_move(sources, monkeypatch):
    """Such as GPT-2's eos_token_id, 50256, which comes last."""
    source = sources["byte_bpe"]
    end = load_tokenizer(source).convert_tokens_to_ids(END)
    monkeypatch.setattr(plan_module, "default_ids", lambda _: {"sep_token_id": end, "unk_token_id": 0})
    made, config = config_after(source)
    assert config["sep_token_id"] == len(made.kept["tokens"]) - 1
    assert "unk_token_id" not in config


def test_a_sentencepiece_model_beside_a_tokenizer_json_is_shortened():
    data = sentencepiece_model(TEXT, "unigram", 90, user_defined_symbols=["<ours>"])
    pieces = [(piece.text, piece.score) for piece in read_model(data)[0]]
    tokenizer = Tokenizer(Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    source = tiny_family("in", "llama", vocab_size=len(pieces))
    tokenizer.save(str(source / "tokenizer.json"))
    write_json(source / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (source / "tokenizer.model").write_bytes(data)
    made = trimmed(source)
    new = made.files["tokenizer.model"]
    kept = json.loads(made.files["tokenizer.json"] or b"")["model"]["vocab"]
    assert [piece.text for piece in read_model(new)[0]] == [text for text, _ in kept]
    assert len(kept) == len(made.kept["tokens"]) < len(pieces)


PROMPT = "where is the market: "
PROMPTS = {
    "config_sentence_transformers.json": {"prompts": {"query": PROMPT, "document": ""}},
    "config.json": {
        "task_specific_params": {"summarization": {"prefix": PROMPT}, "other": {"max_length": 9}}
    },
    "chat_template.json": {"chat_template": f"{PROMPT}{{{{ messages[0].content }}}}"},
}


@pytest.mark.parametrize("name", PROMPTS)
def test_what_stands_before_texts_stays(name, sources):
    source = Path(shutil.copytree(sources["unigram"], "in"))
    held = config_of(source) if name == "config.json" else {}
    write_json(source / name, {**held, **PROMPTS[name]})
    old, new = load_tokenizer(source), new_tokenizer(source, trimmed(source, min_count=3))
    assert old.tokenize(PROMPT) == new.tokenize(PROMPT)


def test_positions_are_counted_from_the_same_padding(sources):
    tokenizer = load_tokenizer(sources["word_level"])
    source = tiny_family("in", "roberta", vocab_size=len(tokenizer), pad_token_id=20)
    tokenizer.save_pretrained(source)
    assert trimmed(source, ("cat",)).kept["tokens"][20] == 20


def test_ids_of_modules_move_with_their_tokens(sources):
    source = Path(shutil.copytree(sources["word_level"], "in"))
    write_json(
        source / "modules.json", [{"path": "", "type": "Transformer"}, {"path": "1", "type": "LogitScore"}]
    )
    (source / "1").mkdir()
    write_json(source / "1" / "config.json", {"true_token_id": 30, "false_token_id": None})
    made = trimmed(source)
    settings = json.loads(made.files["1/config.json"])
    assert made.kept["tokens"][settings["true_token_id"]] == 30
    assert settings["true_token_id"] < 30


def test_timestamps_stay_though_they_are_no_tokens(sources):
    """Whisper's tokenizers lacked them in its first year."""
    source = Path(shutil.copytree(sources["unigram"], "in"))
    size = config_of(source)["vocab_size"]
    write_json(source / "generation_config.json", {"no_timestamps_token_id": size - 4})
    assert trimmed(source).kept["tokens"][-4:] == (*range(size - 4, size),)


def test_one_of_another_tokenizer_is_left_out():
    """A model of other words under the name of this one's."""
    source = KINDS["unigram"](Path("in"))
    (source / "spiece.model").write_bytes(sentencepiece_model(TEXT, "bpe", 120))
    assert trimmed(source).files["spiece.model"] is None


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda source: (source / "tokenizer.json").unlink(), CheckpointError, "tokenizer is missing"),
        (lambda source: (source / "generation_config.json").write_text("{"), CheckpointError, "cut short"),
        (lambda source: change_config(source, model_type="x"), UnsupportedModelError, "family"),
        (
            lambda source: write_json(source / "modules.json", [{"path": "", "type": "WordWeights"}]),
            UnsupportedModelError,
            "for each token",
        ),
    ],
)
def test_what_cannot_be_trimmed_is_refused(damage, error, message):
    source = tiny_family("in", "gpt2")
    damage(source)
    with pytest.raises(error, match=message):
        trimmed(source, ("the hat",))


def test_a_tokenizer_without_files_that_can_be_shortened_is_refused():
    """ByT5 knows bytes alone."""
    source = tiny_family("in", "t5", vocab_size=384)
    (source / "tokenizer.json").unlink()
    write_json(source / "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer"})
    with pytest.raises(UnsupportedModelError, match="is a ByT5Tokenizer"):
        trimmed(source)


def test_tokenizers_that_differ_are_refused(sources):
    old = load_tokenizer(sources["byte_bpe"])
    same = {number: number for number in range(len(old))}
    assert check_same((old, old), same, SEEN)["sentences"] == 3
    with pytest.raises(CheckpointError, match=r"the trimmed tokenizer would give '.*' the id 7, not 8"):
        check_same((old, old), {**same, 7: 8, 8: 7}, SEEN)


def test_text_cut_otherwise_is_refused(sources, monkeypatch):
    """Without what leads to the seen tokens, they are not found again."""
    monkeypatch.setattr(Vocabulary, "closure", lambda self, tokens: set(tokens))
    with pytest.raises(CheckpointError, match="into other tokens\nNothing was written"):
        trimmed(sources["byte_bpe"])


TOKENS = ("<s>", "a", "b", "c", "d", "ab", "cd", "abcd", "bc", "da", "<mask>")
RANKS = {("a", "b"): 0, ("c", "d"): 1, ("ab", "cd"): 2, ("b", "c"): 3, ("d", "a"): 4}
VOCABULARY = Vocabulary(
    frozenset("abcd"),
    (lambda left, right: RANKS.get((left, right)),),
    {token: number for number, token in enumerate(TOKENS)},
    frozenset({"<s>", "<mask>"}),
)
LINES = Lines(("one",) * 3, ("val",), (), ("eng",), None)
COUNTS = {"abcd": 5, "bc": 2, "a": 1, "no token": 4}


@pytest.fixture
def checkpoint(models):
    return open_model(models["gpt2"])


def decided(checkpoint, counts=COUNTS, needed=(), **options):
    return select_tokens(checkpoint, VOCABULARY, LINES, counts, VocabularyOptions(**options), needed)


def tokens(plan: Selection) -> list[str]:
    return [TOKENS[number] for number in plan.kept["tokens"]]


@pytest.mark.parametrize(
    ("counts", "options", "stays", "share"),
    [
        (COUNTS, {"min_count": 3}, [token for token in TOKENS if token not in ("da", "bc")], 6 / 8),
        ({}, {}, ["<s>", "a", "b", "c", "d", "<mask>"], 1),
        # "no token" is a piece that the vocabulary lacks
        (COUNTS, {}, [token for token in TOKENS if token != "da"], 1),
    ],
)
def test_tokens_stay_with_what_makes_them(counts, options, stays, share, checkpoint):
    made = decided(checkpoint, counts, **options)
    assert tokens(made) == stays
    assert made.details["text"]["share_kept"] == share


def test_ids_that_configs_name_stay(checkpoint):
    """Even those of no token: rows beyond the tokenizer's."""
    made = decided(checkpoint, {}, needed=[9, 20, 0, VOCAB, -1])
    assert made.kept["tokens"] == (0, 1, 2, 3, 4, 9, 10, 20)
    assert made.details["parts"]["no token"] == 1


@pytest.mark.parametrize(("multiple", "count"), [(1, 6), (4, 8), (11, 11)])
def test_up_to_a_multiple(multiple, count, checkpoint):
    made = decided(checkpoint, {}, multiple_of=multiple)
    assert len(made.kept["tokens"]) == count
    kept = set(tokens(made))
    assert VOCABULARY.closure(kept) == kept


def test_a_tokenizer_that_the_embeddings_cannot_hold_is_refused(checkpoint):
    larger = replace(VOCABULARY, ids={"a": 0, "z": VOCAB})
    with pytest.raises(CheckpointError, match=f"'z' the id {VOCAB}, its embeddings have {VOCAB} rows"):
        select_tokens(checkpoint, larger, LINES, COUNTS, VocabularyOptions())


def test_a_long_document_is_cut_at_line_ends(monkeypatch):
    monkeypatch.setattr(plan_module, "BATCH", 10)
    document = "\n".join(map(str, range(20)))
    plain = PlainText((), (document,))
    pieces = Text.of(Lines((), (), (), (), plain), SimpleNamespace(get_added_vocab=dict)).documents
    assert "".join(pieces) == f"{document}\n"
    assert all(piece.endswith("\n") for piece in pieces)
    assert 2 < len(pieces) < 10
    assert max(map(len, pieces)) < 15
