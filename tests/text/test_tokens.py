import itertools
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PLBartTokenizer
from transformers.integrations.mistral import tokenizer as mistral
from transformers.models.auto import tokenization_auto

from prunecli.errors import CheckpointError, DataError, TextWarning, UnsupportedModelError
from prunecli.text.batching import Marks, length_bucketed, marks_of, masked
from prunecli.text.tokens import encode, language_id, languages, load_tokenizer
from tests.families import tiny_family
from tests.methods.vocabulary.makers import TEXT, marian, sentencepiece_model
from tests.tiny import LANGUAGES, change_config, tiny_nllb_moe, write_json, write_plain_tokenizer


@pytest.fixture(scope="module")
def tokenizer(shared_path):
    return load_tokenizer(tiny_nllb_moe(shared_path))


def test_language_token_first_and_end_token_last(tokenizer):
    french, german = (language_id(tokenizer, name) for name in ("fra_Latn", "deu_Latn"))
    source, target = (
        encode(tokenizer, ["the hat", ""], name, as_target=name == "deu_Latn")
        for name in ("fra_Latn", "deu_Latn")
    )
    assert (source[1], target[1]) == ([french, tokenizer.eos_token_id], [german, tokenizer.eos_token_id])
    assert (source[0][0], target[0]) == (french, [german, *source[0][1:]])
    assert encode(tokenizer, ["the hat", ""], "fra_Latn") == source


def test_long_sentences_are_cut_with_their_special_tokens_kept(tokenizer):
    row = encode(tokenizer, ["the hat is on the hen"], "eng_Latn", max_length=4)[0]
    assert len(row) == 4
    assert row[0] == language_id(tokenizer, "eng_Latn")
    assert row[-1] == tokenizer.eos_token_id


class TwoVocabularies:
    """A tokenizer like FSMT's, which takes every text for one of the source language."""

    src_lang, tgt_lang, tgt_vocab_file, name_or_path = "en", "de", "b", "here"
    unk_token_id = bos_token_id = eos_token_id = pad_token_id = None

    def __init__(self):
        self.encoder = {"a": 0, "b": 1}
        self.decoder = {0: "b", 1: "c", 2: "a"}
        self.added_tokens_decoder = self.special_tokens_map = {}

    def __call__(self, *, text=None, text_target=None):
        assert self.src_lang == ("en" if text else "de")
        return {"input_ids": [[self.encoder[word] for word in one] for one in text or text_target]}


def test_a_tokenizer_with_two_vocabularies_reads_targets_by_the_second():
    tokenizer = TwoVocabularies()
    assert encode(tokenizer, ["ab"], "en") == [[0, 1]]
    assert encode(tokenizer, ["abc"], "de", as_target=True) == [[2, 0, 1]]
    assert encode(tokenizer, ["ab"], "en") == [[0, 1]]


def test_targets_of_marian_are_cut_by_its_second_model():
    tokenizer = load_tokenizer(marian(Path()))
    german = encode(tokenizer, ["die alte"], "de", as_target=True)
    assert german == tokenizer(text_target=["die alte"])["input_ids"] != encode(tokenizer, ["die alte"], "en")


def test_languages_of_plbart_are_named_without_underscores():
    Path("model").write_bytes(sentencepiece_model(TEXT, "bpe", 120))
    tokenizer = PLBartTokenizer("model", language_codes="multi")
    assert languages(tokenizer)[:3] == ("en_XX", "go", "java")
    assert encode(tokenizer, [""], "java") == [[tokenizer.eos_token_id, language_id(tokenizer, "java")]]


def test_a_word_that_was_added_is_no_language():
    write_plain_tokenizer(Path())
    tokenizer = load_tokenizer(Path())
    tokenizer.add_tokens(["covid"])
    assert languages(tokenizer) == ()


def test_text_of_unknown_tokens_warns(tokenizer):
    with pytest.warns(TextWarning, match="more than a quarter"):
        encode(tokenizer, ["the", "шляпа и коза"], "eng_Latn")


def test_an_unknown_language_brings_a_near_one_or_those_that_are_known(tokenizer):
    with pytest.raises(DataError, match=r"unknown language 'fra_Lat'.*\n.*fra_Latn"):
        encode(tokenizer, ["x"], "fra_Lat")
    known = r"\nKnown: deu_Latn, eng_Latn, fra_Latn\. Give text in languages of the model with `data`\.$"
    with pytest.raises(DataError, match=known):
        language_id(tokenizer, "qba_Latn")


def test_a_reduced_checkpoint_opens_without_running_its_code():
    checkpoint = tiny_nllb_moe("model")
    own = {"AutoConfig": "modeling_prunecli.PrunecliConfig"}
    change_config(checkpoint, model_type="prunecli-nllb-moe", auto_map=own)
    (checkpoint / "modeling_prunecli.py").write_text("raise SystemExit('this code was run')\n")
    assert languages(load_tokenizer(checkpoint)) == tuple(sorted(LANGUAGES))


@pytest.mark.parametrize("model_type", ["bert", "llama", "nllb-moe", "qwen3_moe"])
@pytest.mark.parametrize("settings", [None, '{"unk_token": "<unk>"}'])
def test_a_tokenizer_that_is_missing(model_type, settings):
    """For some families transformers makes an empty tokenizer."""
    write_json("config.json", {"model_type": model_type})
    if settings is not None:
        Path("tokenizer_config.json").write_text(settings)
    said = r"tokenizer is missing: none of tokenizer\.json,.*\n.*Copy the model's tokenizer files"
    with pytest.raises(CheckpointError, match=said):
        load_tokenizer(Path())


def test_tekken_json_is_not_read_in_place_of_tokenizer_json(monkeypatch):
    """transformers does so where mistral-common is installed."""
    source = tiny_family("model", "llama")
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "llama", "MistralCommonBackend")
    monkeypatch.setattr(mistral, "resolve_mistral_format", lambda *_, **__: (True,))
    assert load_tokenizer(source).is_fast


def test_a_tokenizer_of_files_that_its_class_does_not_read():
    """transformers makes an empty one of a published ALBERT's vocab.txt, so that every text is unknown tokens."""
    write_json("config.json", {"model_type": "albert"})
    Path("vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nC\nO\n")
    with pytest.raises(CheckpointError, match="knows no tokens: AlbertTokenizer reads none of its files"):
        load_tokenizer(Path())


LENGTHS = st.lists(st.integers(1, 60), max_size=80)


@given(LENGTHS, st.integers(1, 200), st.none() | st.integers(1, 9))
def test_every_index_once_within_the_budget_longest_first(lengths, max_tokens, max_sentences):
    batches = length_bucketed(lengths, max_tokens, max_sentences)
    flat = [index for batch in batches for index in batch]
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[i] for i in flat] == sorted(lengths, reverse=True)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= max_tokens
        assert max_sentences is None or len(batch) <= max_sentences


@given(LENGTHS, st.integers(1, 200))
def test_batches_are_as_full_as_the_order_allows(lengths, max_tokens):
    batches = length_bucketed(lengths, max_tokens)
    for batch, following in itertools.pairwise(batches):
        assert following
        assert (len(batch) + 1) * lengths[batch[0]] > max_tokens


END = 1
MARKS = Marks(tuple(range(1000, 1100)), END)


def restored(inputs: list[int], targets: list[int]) -> list[int]:
    """The text that both sides say together: each sentinel of the one replaced by what the other has after it."""
    spans = {}
    for token in targets:
        if token in MARKS.sentinels:
            sentinel = token
        else:
            spans.setdefault(sentinel, []).append(token)
    return [piece for token in inputs for piece in spans.get(token, [token])]


@pytest.mark.parametrize("length", [1, 7, 64])
def test_both_sides_together_are_the_text(length):
    window = [number % 900 + 2 for number in range(length)]
    inputs, targets = masked([*window, END], MARKS)
    assert inputs[-1] == targets[-1] == END
    assert restored(inputs[:-1], targets[:-1]) == window
    used = [token for token in inputs if token in MARKS.sentinels]
    assert used == [token for token in targets if token in MARKS.sentinels] == [*MARKS.sentinels[: len(used)]]
    hidden = len(targets) - 1 - len(used)
    assert hidden == max(1, round(0.15 * length))
    assert len(used) == max(1, min(round(hidden / 3), 100))


def _tokenizer(*names: str) -> Mock:
    return Mock(eos_token_id=END, get_vocab=lambda: {name: number for number, name in enumerate(names)})


def test_sentinels_are_the_tokenizers_in_order():
    assert marks_of(_tokenizer("<extra_id_1>", "a", "<extra_id_0>", "<extra_id_3>")) == Marks((2, 0), END)


def test_a_tokenizer_without_sentinels_is_refused():
    with pytest.raises(UnsupportedModelError, match="no <extra_id_0>"):
        marks_of(_tokenizer("a"))
