"""Tokenizers that know tokens for which the model's table has no row: those of another model, or with tokens added."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prunecli import load_model
from prunecli.errors import CheckpointError
from prunecli.evaluation.decoding import DecodingOptions, translate
from prunecli.methods.experts.batches import text_windows
from prunecli.running.encoding import labelled_examples, padding_id, text_examples, translation_examples
from prunecli.running.windows import lm_windows, mlm_examples, packed_examples
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import Corpus, LabelledText
from prunecli.text.tokens import encode, load_tokenizer
from tests.families import tiny_family

LINES = ("the tin", "the hen")
PAIR = ("eng_Latn", "fra_Latn")
TEXT = ParallelText("t", {"eng_Latn": ("the tin", "the"), "fra_Latn": ("ten", "hen")})
LABELLED = LabelledText(Path("t"), ("LABEL_0", "LABEL_1"), LINES, None, (1, 2))
Make = Callable[..., tuple[Any, Any]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """(family, special tokens) -> its tokenizer with these, or with "hen", and the model without."""

    def made(family: str, /, cls: str | None = None, **special: str) -> tuple[Any, Any]:
        changes = {} if cls is None else {"architectures": [cls], "num_labels": 2}
        path = tiny_family(tmp_path_factory.mktemp("models") / family, family, **changes)
        tokenizer = load_tokenizer(path)
        if special:
            tokenizer.add_special_tokens(special)
        else:
            tokenizer.add_tokens(["hen"])
        return tokenizer, load_model(path, device="cpu")

    return made


@pytest.fixture(scope="module")
def searching(make: Make) -> tuple[Any, Any]:
    return make("m2m_100")


Use = Callable[[Any, Any], Any]
USES: dict[str, tuple[str, str | None, Use]] = {
    "sentences": ("m2m_100", None, lambda words, model: translation_examples(words, model, TEXT, [PAIR])),
    "translation": (
        "m2m_100",
        None,
        lambda words, model: translate(model, words, LINES, PAIR, DecodingOptions()),
    ),
    "labelled": (
        "bert",
        "BertForSequenceClassification",
        lambda words, model: labelled_examples(words, model, LABELLED),
    ),
    "texts": ("gpt2", None, lambda words, model: text_examples(words, model, LINES)),
    "windows": ("gpt2", None, lambda words, model: lm_windows(words, model, LINES)),
    "packed": ("gpt2", None, lambda words, model: packed_examples(words, model, LINES)),
    "masked": ("bert", None, lambda words, model: mlm_examples(words, model, LINES)),
    "corpus": (
        "gpt2",
        None,
        lambda words, model: text_windows(
            words, Corpus("a", (), LINES), 8, vocabulary=model.config.vocab_size
        ),
    ),
}


@pytest.mark.parametrize("use", USES)
def test_an_added_token_is_refused_where_texts_are_encoded(make: Make, use: str) -> None:
    family, cls, call = USES[use]
    tokenizer, model = make(family, cls)
    rows = model.config.vocab_size
    with pytest.raises(CheckpointError) as caught:
        call(tokenizer, model)
    assert caught.value.message == (
        f"{tokenizer.name_or_path}: the tokenizer gives the id {rows} ('hen'), "
        f"and the model's table has {rows} rows"
    )


@pytest.mark.parametrize(
    ("family", "special", "use"),
    [
        ("gpt2", "bos_token", lm_windows),
        ("gpt2", "bos_token", packed_examples),
        ("gpt2", "eos_token", packed_examples),
        ("bert", "mask_token", mlm_examples),
    ],
)
def test_so_is_a_special_token_that_prunecli_puts_in(
    make: Make, family: str, special: str, use: Callable[..., Any]
) -> None:
    tokenizer, model = make(family, **{special: "[NEW]"})
    with pytest.raises(CheckpointError, match=r"gives the id \d+ \('\[NEW\]'\)"):
        use(tokenizer, model, LINES)


def test_and_a_language(make: Make) -> None:
    tokenizer, model = make("m2m_100")
    number = model.config.vocab_size = tokenizer.convert_tokens_to_ids("fra_Latn")
    with pytest.raises(CheckpointError, match=rf"gives the id {number} \('fra_Latn'\)"):
        translate(model, tokenizer, (), ("eng_Latn", "fra_Latn"), DecodingOptions())


def test_an_unknown_word_without_an_unknown_token_is_refused(make: Make) -> None:
    class Without:
        name_or_path = "here"

        def __call__(self, text: list[str]) -> dict[str, list[list[int | None]]]:
            return {"input_ids": [[3, None]]}

    assert encode(Without(), ["a"], "eng_Latn") == [[3, None]]
    with pytest.raises(CheckpointError, match="here: the tokenizer gives the id None, and"):
        encode(Without(), ["a"], "eng_Latn", vocabulary=9)


@pytest.mark.parametrize("value", [[1], "9", -1, float("nan"), None])
def test_a_length_of_texts_that_is_none_is_refused(make: Make, value: object) -> None:
    tokenizer, model = make("gpt2")
    tokenizer.model_max_length = value
    with pytest.raises(CheckpointError, match=r"model_max_length is .*, not a number of tokens"):
        text_examples(tokenizer, model, ["the tin"])


def test_masked_text_gets_no_such_token(make: Make) -> None:
    tokenizer, model = make("bert")
    examples = mlm_examples(tokenizer, model, ["the tin"])
    assert examples.vocabulary.max() < model.config.vocab_size


def test_a_padding_token_of_the_tokenizer_alone_is_not_used(make: Make) -> None:
    """It was added to many language models that had none; what stands in padding does not matter."""
    tokenizer, model = make("gpt2", pad_token="[PAD]")
    model.config.pad_token_id = None
    assert tokenizer.pad_token_id == model.config.vocab_size
    assert padding_id(model, tokenizer) == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder_start_token_id", 99),
        ("forced_eos_token_id", [2, 99]),
        ("eos_token_id", "x"),
        ("bad_words_ids", [[99]]),
        ("sequence_bias", [[[99], 1.0]]),
    ],
)
def test_tokens_of_the_generation_config_that_a_search_fails_over(
    searching: tuple[Any, Any], key: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, model = searching
    monkeypatch.setattr(model.generation_config, key, value)
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {key} is .*(99|'x')"):
        translate(model, tokenizer, ["a"], PAIR, DecodingOptions(beam=1, max_new_tokens=3))


def test_other_failures_of_a_search_stay_what_they_are(
    searching: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, model = searching
    monkeypatch.setattr(model.generation_config, "suppress_tokens", [99])
    translate(model, tokenizer, ["a"], PAIR, DecodingOptions(beam=1, max_new_tokens=3))
    monkeypatch.setattr(model.generation_config, "suppress_tokens", None)
    with pytest.raises(RuntimeError, match="negative dimension"):
        translate(model, tokenizer, ["a"], PAIR, DecodingOptions(beam=-1))


@pytest.mark.parametrize(("key", "value"), [("pad_token_id", -7), ("decoder_start_token_id", -1)])
def test_negative_ids_in_config_json(make: Make, key: str, value: int) -> None:
    tokenizer, model = make("m2m_100")
    setattr(model.config, key, value)
    with pytest.raises(
        CheckpointError, match=f"config.json: {key} is {value}; the model has the tokens 0 to"
    ):
        translation_examples(tokenizer, model, TEXT, [PAIR])
