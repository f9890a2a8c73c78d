"""Tokenizer files from bytes to bytes and token ids in configs, by hand."""

import json
from typing import Any

import pytest

from prunecli.errors import CheckpointError, UsageError
from prunecli.methods.vocabulary.tokenizer import Renumbering, named_ids, renumbered, tokenizer_files

CHANGE = Renumbering({0: 0, 2: 1, 3: 2, 5: 3}, frozenset({"b", "ab"}), 6)
"""Of <s> b a c ab </s>, without b and ab."""


def rewritten(name: str, content: Any) -> Any:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    made = tokenizer_files({name: data}, CHANGE).get(name, data)
    assert made is not None
    return made.decode() if isinstance(content, bytes) else json.loads(made)


def test_ids_around_the_model():
    template = {"special_tokens": {"</s>": {"id": "</s>", "ids": [5], "tokens": ["</s>"]}}}
    document = {
        "model": {"vocab": {"a": 2}},
        "added_tokens": [{"id": 5, "content": "</s>"}],
        "padding": {"pad_id": 3, "pad_token": "c"},
        "post_processor": {
            "type": "Sequence",
            "processors": [template, {"sep": ["</s>", 5], "cls": ["<s>", 0]}],
        },
    }
    found = rewritten("tokenizer.json", document)
    assert found["added_tokens"] == [{"id": 3, "content": "</s>"}]
    assert found["padding"] == {"pad_id": 2, "pad_token": "c"}
    first, second = found["post_processor"]["processors"]
    assert first["special_tokens"]["</s>"]["ids"] == [3]
    assert second == {"sep": ["</s>", 3], "cls": ["<s>", 0]}


def test_slow_files():
    assert rewritten("vocab.json", {"<s>": 0, "b": 1, "c": 3}) == {"<s>": 0, "c": 2}
    assert rewritten("added_tokens.json", {"</s>": 5}) == {"</s>": 3}
    assert rewritten("vocab.txt", b"<s>\nb\na\nc\nab\n</s>\n") == "<s>\na\nc\n</s>\n"
    assert rewritten("vocab.txt", b"<s>\nb\na\nc\nab\n</s>") == "<s>\na\nc\n</s>\n"
    merges = b"#version: 0.2\na b\na c\n# a\n"
    assert rewritten("merges.txt", merges) == "#version: 0.2\na c\n# a\n"
    added = {"added_tokens_decoder": {"0": {"content": "<s>"}, "5": {"content": "</s>"}}, "x": 5}
    assert rewritten("tokenizer_config.json", added) == {
        "added_tokens_decoder": {"0": {"content": "<s>"}, "3": {"content": "</s>"}},
        "x": 5,
    }


@pytest.mark.parametrize(
    "name", ["tekken.json", "vocab.bpe", "o200k.tiktoken", "tokenizer.model", "source.spm"]
)
def test_vocabularies_that_cannot_be_shortened_are_left_out(name):
    assert tokenizer_files({name: b"no protocol buffer"}, CHANGE) == {name: None}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b'{"model": {}}'),
        ("vocab.json", b"[1]"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}'),
        ("vocab.txt", b"\xff\xfe"),
        ("merges.txt", b"\xff"),
    ],
)
def test_damaged_files_are_refused(name, data):
    with pytest.raises(CheckpointError, match=f"{name}: damaged"):
        tokenizer_files({name: data}, CHANGE)


@pytest.mark.parametrize(
    "document",
    [
        {"model": {"vocab": {}}, "added_tokens": [{"id": 4, "content": "ab"}]},
        {"model": {"vocab": {}}, "post_processor": {"cls": ["ab", 4]}},
        {"model": {"vocab": [["a", 0.0]], "unk_id": 1}},
    ],
)
def test_a_special_token_that_would_go_is_refused(document):
    with pytest.raises(UsageError, match="is special, and would be removed"):
        rewritten("tokenizer.json", document)


IDS = Renumbering({0: 0, 2: 1, 5: 2, 9: 3}, frozenset({"b", "d"}), 10)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("pad_token_id", 2, 1),
        ("eos_token_id", [2, 5], [1, 2]),
        ("forced_bos_token_id", 9, 3),
        ("pad_token_id", -1, -1),
        ("bos_token_id", None, None),
        ("pad_token_id", 10, 10),  # beyond the embeddings: no token's id
        ("force_words_ids", [[2, 5]], [[1, 2]]),
        ("image_token_index", 9, 3),  # LLaVA, PaliGemma, Gemma 3
        ("lang_to_id", {"<|de|>": 5, "<|en|>": 9}, {"<|de|>": 2, "<|en|>": 3}),  # Whisper
        ("forced_decoder_ids", [[1, None], [2, 5]], [[1, None], [2, 2]]),
        ("forced_decoder_ids", None, None),
        ("suppress_tokens", [1, 2, 3, 5], [1, 2]),
        ("begin_suppress_tokens", [1], None),
        ("suppress_tokens", [], []),
        ("bad_words_ids", [[5], [2, 3], [2, 9]], [[2], [1, 3]]),
        ("bad_words_ids", [[3]], None),
        ("sequence_bias", [[[2, 5], -1.5], [[3], 2.0]], [[[1, 2], -1.5]]),
        ("max_length", 9, 9),
        ("num_labels", 5, 5),
    ],
)
def test_renumbered(key, value, wanted):
    assert renumbered({key: value}, IDS) == {key: wanted}


def test_configs_inside_are_entered_but_not_labels_or_history():
    document = {
        "decoder": {"pad_token_id": 5},
        "prunecli": {"pad_token_id": 5},
        "id2label": {"pad_token_id": 5},
    }
    wanted = {**document, "decoder": {"pad_token_id": 2}}
    assert renumbered(document, IDS) == wanted
    assert list(named_ids(document)) == [5]


def test_named_ids_are_those_that_must_stay():
    document = {
        "eos_token_id": [2, 5],
        "decoder_start_token_id": 9,
        "bos_token_id": None,
        "suppress_tokens": [1],
        "bad_words_ids": [[4]],
        "boi_token_index": 6,
        "task_to_id": {"transcribe": 7},
        "forced_decoder_ids": [[1, None], [2, 8]],
    }
    assert sorted(named_ids(document)) == [2, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("key", ["pad_token_id", "forced_eos_token_id", "force_words_ids"])
def test_an_id_that_would_go_is_refused(key):
    with pytest.raises(UsageError, match="id 3 is special, and would be removed"):
        renumbered({key: [3] if key.endswith("ids") else 3}, IDS)
