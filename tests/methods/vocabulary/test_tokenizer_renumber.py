"""Tokenizer files from bytes to bytes and token ids in configs, by hand."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordPiece

from prunecli.errors import UnsupportedModelError
from prunecli.methods.vocabulary.tokenizer import (
    Renumbering,
    named_ids,
    of_backend,
    read_model,
    renumbered,
    tokenizer_files,
)
from tests.methods.vocabulary.makers import TEXT, sentencepiece_model

TOKENS = {"<s>": 0, "b": 1, "a": 2, "c": 3, "ab": 4, "</s>": 5}
CHANGE = Renumbering({0: 0, 2: 1, 3: 2, 5: 3}, TOKENS, 6)
"""Without b and ab."""


def rewritten(name: str, content: Any) -> Any:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    made = tokenizer_files({name: data}, CHANGE).get(name, data)
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
    assert rewritten("vocab.json", {"a": 1, "c": 4, "x": 3}) == {"a": 1, "c": 2}  # older than the tokenizer
    assert rewritten("vocab.txt", b"<s>\nb\na\nc\nab\n</s>\n") == "<s>\na\nc\n</s>\n"
    assert rewritten("vocab.txt", b"<s>\nb\na\nc\nab\n</s>") == "<s>\na\nc\n</s>\n"
    merges = b"#version: 0.2\na b\na c\n# a\n"
    assert rewritten("merges.txt", merges) == "#version: 0.2\na c\n# a\n"
    assert rewritten("processor_config.json", {"image_token_id": 5}) == {"image_token_id": 3}
    added = {"added_tokens_decoder": {"0": {"content": "<s>"}, "5": {"content": "</s>"}}, "x": 5}
    assert rewritten("tokenizer_config.json", added) == {
        "added_tokens_decoder": {"0": {"content": "<s>"}, "3": {"content": "</s>"}},
        "x": 5,
    }


OTHERS = "tekken.json vocab.bpe o200k.tiktoken tokenizer.model x.spm tokenizer.model.v3 vocab.json"


@pytest.mark.parametrize("name", OTHERS.split())
def test_vocabularies_that_cannot_be_shortened_are_left_out(name):
    assert tokenizer_files({name: b"neither JSON nor a protocol buffer"}, CHANGE) == {name: None}


IDS = Renumbering({0: 0, 2: 1, 5: 2, 9: 3}, {}, 10)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        *(("pad_token_id", 2, 1), ("eos_token_id", [2, 5], [1, 2])),
        *(("pad_token_id", -1, -1), ("bos_token_id", None, None)),
        ("pad_token_id", 10, 10),  # beyond the embeddings: no token's id
        ("force_words_ids", [[2, 5]], [[1, 2]]),
        ("image_token_index", 9, 3),  # LLaVA, PaliGemma, Gemma 3
        ("lang_to_id", {"<|de|>": 5, "<|en|>": 9}, {"<|de|>": 2, "<|en|>": 3}),  # Whisper
        ("forced_decoder_ids", [[1, None], [2, 5]], [[1, None], [2, 2]]),
        ("forced_decoder_ids", None, None),
        *(("suppress_tokens", [1, 2, 3, 5], [1, 2]), ("suppress_tokens", [], [])),
        *(("bad_words_ids", [[5], [2, 3], [2, 9]], [[2], [1, 3]]), ("bad_words_ids", [[3]], None)),
        ("begin_suppress_tokens", [1], None),
        ("sequence_bias", [[[2, 5], -1.5], [[3], 2.0]], [[[1, 2], -1.5]]),
        ("vocabulary_map", {"<image>": 5, "b": 3}, {"<image>": 2}),  # Emu3
        ("id_to_text", {"2": "a", "3": "b", "5": ""}, {"1": "a", "2": ""}),  # SeamlessM4T v2
        ("max_length", 9, 9),
    ],
)
def test_renumbered(key, value, wanted):
    assert renumbered({key: value}, IDS) == {key: wanted}


def test_configs_inside_are_entered_but_not_labels_or_history():
    document = {key: {"pad_token_id": 5} for key in ("decoder", "prunecli", "id2label")}
    wanted = {**document, "decoder": {"pad_token_id": 2}}
    assert renumbered(document, IDS) == wanted
    assert list(named_ids(document)) == [5]


def test_named_ids_are_those_that_must_stay():
    document = {"eos_token_id": [2, 5], "decoder_start_token_id": 9, "bos_token_id": None}
    document |= {"suppress_tokens": [1], "bad_words_ids": [[4]], "boi_token_index": 6}
    document |= {"task_to_id": {"transcribe": 7}, "forced_decoder_ids": [[1, None], [2, 8]]}
    assert sorted(named_ids(document)) == [2, 5, 6, 7, 8, 9]
    padding = {"model": {"vocab": {"a": 3}, "unk_id": 1}, "padding": {"pad_id": 4, "pad_token": "a"}}
    added = {"added_tokens_decoder": {"8": {"content": "b"}}}
    files = {"tokenizer.json": padding, "tokenizer_config.json": added, "vocab.json": {"c": 7}}
    assert named_ids({}, {name: json.dumps(value).encode() for name, value in files.items()}) == {1, 4, 8}


def test_unigram_keeps_the_least_likely_piece():
    """An unknown character costs 10 more than it."""
    pieces = [("<unk>", 0.0), ("a", -2.0), ("ab", -3.0), ("xyz", -9.5), ("<0x41>", -4.0)]
    vocabulary = of_backend(Tokenizer(Unigram(pieces, unk_id=0)))
    assert vocabulary.always == {"a", "xyz", "<unk>", "<0x41>"}
    assert vocabulary.closure(["ab"]) == {"ab"}


def test_wordpiece_keeps_letters_at_the_beginning_and_inside():
    vocab = {token: number for number, token in enumerate(["[UNK]", "a", "##b", "##bc", "ab", "##"])}
    vocabulary = of_backend(Tokenizer(WordPiece(vocab, unk_token="[UNK]")))
    assert vocabulary.always == {"a", "##b"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"type": "BPE", "end_of_word_suffix": "</w>"}, 'BPE tokenizer has a "end_of_word_suffix"'),
        ({"type": "BPE", "continuing_subword_prefix": "@@"}, 'has a "continuing_subword_prefix"'),
        ({"type": "Unigram", "vocab": [["a", 0.0], ["a", -1.0]]}, "holds a piece twice"),
        ({"type": "Bigram"}, 'of the kind "Bigram"'),
        ({}, 'of the kind "None"'),
    ],
)
def test_models_of_other_kinds_are_refused(model, message):
    with pytest.raises(UnsupportedModelError, match=message):
        of_backend(SimpleNamespace(to_str=lambda: json.dumps({"model": model})))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"IQ== 0\nIg== 1\n",  # a tiktoken vocabulary
        b"\x0a\x05ab",  # longer than the file
        b"\x0b\x00",  # a wire type that no longer exists
        b"\x80\x80\x80",  # a number without an end
        b"\x08\x01",  # pieces that are numbers
        sentencepiece_model(TEXT, "bpe", 60)[:-3],
    ],
)
def test_other_files_are_refused(data):
    with pytest.raises((ValueError, TypeError, LookupError)):
        read_model(data)
