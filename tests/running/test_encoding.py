from contextlib import nullcontext
from itertools import permutations, product
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch.nn import functional

from prunecli.errors import CheckpointError, DataError, UnsupportedModelError, UsageError
from prunecli.evaluation.decoding import DecodingOptions, generate, translate
from prunecli.methods.experts.batches import text_windows
from prunecli.model.checkpoint import open_model
from prunecli.modules.pooling import Pooling
from prunecli.running import encoding
from prunecli.running.encoding import (
    decoder_inputs,
    embedding_examples,
    labelled_examples,
    lm_windows,
    mlm_examples,
    output_language,
    packed_examples,
    padding_id,
    require_task,
    text_examples,
    translation_examples,
)
from prunecli.running.examples import Examples
from prunecli.text.choice import training_task_of
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import Corpus, LabelledText
from prunecli.text.tokens import encode, load_tokenizer
from tests.families import cutting, tiny, tiny_family
from tests.methods.vocabulary.makers import m2m_100
from tests.opening import load
from tests.reference.losses import causal_nll
from tests.tiny import write_plain_tokenizer
from tests.training.runs import PAIRS


def opened(path):
    return load_tokenizer(path), load(path)


def whole(examples):
    return examples.batch(range(len(examples.lengths))).with_labels


def loss_of(model, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        logits = model(**inputs).logits.flatten(0, -2)
        return float(functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum"))


def test_lines_that_are_blank_on_one_side_are_left_out(models):
    tokenizer, model = opened(models["m2m_100"])
    text = ParallelText("t", {"eng_Latn": ("the", "", "no"), "fra_Latn": ("ten", "on", " ")})
    assert len(translation_examples(tokenizer, model, text, PAIRS, skip_blank=True).lengths) == 2
    blank = ParallelText("t", {"eng_Latn": ("", "no"), "fra_Latn": ("ten", " ")})
    with pytest.raises(DataError, match="every line is blank"):
        translation_examples(tokenizer, model, blank, PAIRS, skip_blank=True)


def test_each_language_is_tokenised_once_in_each_role(models, monkeypatch):
    tokenizer, model = opened(models["m2m_100"])
    text = ParallelText(
        "t", {"eng_Latn": ("the hen", "no", ""), "fra_Latn": ("ten", "", "no"), "deu_Latn": ("on", "in", "a")}
    )
    pairs = [*permutations(text.languages, 2)][::-1]
    one_by_one = [
        whole(translation_examples(tokenizer, model, text, [pair], skip_blank=True)) for pair in pairs
    ]
    watched = Mock(side_effect=encode)
    monkeypatch.setattr(encoding, "encode", watched)
    monkeypatch.setattr(encoding, "AT_ONCE", 2)
    made = translation_examples(tokenizer, model, text, pairs, skip_blank=True)
    roles = [(call.args[2], call.kwargs["as_target"], *call.args[1]) for call in watched.call_args_list]
    assert len(roles) == len(set(roles)) == 12  # two calls for the three lines of each
    assert {role[:2] for role in roles} == {*product(text.languages, (False, True))}
    start = 0
    for expected in one_by_one:
        rows = range(start, start := start + len(expected["labels"]))
        batch = made.batch(rows).with_labels
        assert all(torch.equal(batch[name], value) for name, value in expected.items())
    assert start == len(made.lengths) == 10  # English and French share one line, German two with each


@pytest.mark.parametrize(("family", "context"), [("gpt2", None), ("llama", None), ("llama", 7)])
def test_texts_are_packed_and_ended(models, family, context):
    """Lines one after another with </s> (2) behind each, cut where a window is full."""
    tokenizer, model = opened(models[family])
    lines = ["the hen", "no", "ten " * 60]
    stream = []
    for line in lines:
        ids = tokenizer(line)["input_ids"]
        stream += ids if ids[-1] == 2 else [*ids, 2]
    if stream[0] != tokenizer.bos_token_id:
        stream = [tokenizer.bos_token_id, *stream]
    examples = packed_examples(tokenizer, model, lines, context)
    length = context or 64
    assert [one for one, _ in examples.lengths[:-1]] == [length] * (len(examples.lengths) - 1)
    batch = whole(examples)
    read, following = (
        [token for row in range(len(batch["labels"])) for token in batch[name][row][kept[row]].tolist()]
        for name, kept in (("input_ids", batch["attention_mask"] == 1), ("labels", batch["labels"] != -100))
    )
    assert read == stream[:-1]
    assert following == stream[1:], "every token but the first is predicted, and once"
    if context:
        expected = causal_nll(model, stream[: context + 1], context)
        assert loss_of(model, examples.batch([0]).with_labels) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("make", [packed_examples, text_examples])
def test_a_context_beyond_the_positions_is_refused(make):
    tokenizer, model = opened(tiny_family("model", "llama" if make is packed_examples else "bert"))
    with pytest.raises(UsageError, match=r"context=99`: the model has 6[46] positions"):
        make(tokenizer, model, ["the hen"], 99)


def test_outputs_begin_as_the_targets_of_training_do():
    """M2M-100 calls a language what is no token, and mBART-25 puts it behind texts, from where its shift takes it."""
    tokenizer, model = opened(m2m_100(Path("m2m")))
    german = tokenizer.get_lang_id("de")
    assert output_language(tokenizer, model, "de") == {"forced_bos_token_id": german}
    assert [encode(tokenizer, ["die"], "de", as_target=side)[0][0] for side in (False, True)] == [german] * 2
    model = load(tiny_family("mbart", "mbart"))
    tokenizer = transformers.MBartTokenizer(
        vocab=[(token, 0.0) for token in ["<s>", "<pad>", "</s>", "<unk>", "a"]]
    )
    german = tokenizer.convert_tokens_to_ids("de_DE")
    assert output_language(tokenizer, model, "de_DE") == {"decoder_start_token_id": german}


def test_outputs_of_seamless_begin_as_its_own_search_begins_them():
    model = tiny.build("seamless_m4t")
    words = {token: number for number, token in enumerate(["<pad>", "<unk>", "<s>", "</s>", "a"])}
    tokenizer = transformers.SeamlessM4TTokenizer(words, [], extra_special_tokens=["__deu__", "__eng__"])
    labels = torch.tensor(encode(tokenizer, ["a"], "deu", as_target=True))
    german = tokenizer.convert_tokens_to_ids("__deu__")
    model.generation_config.text_decoder_lang_to_code_id = {"deu": german}
    model.config.decoder_start_token_id = 3
    begun = generate(model, [[4, 3]], 0, 1, 3, **output_language(tokenizer, model, "deu"))[0][:2]
    assert decoder_inputs(model, labels)[0].tolist()[:2] == begun == [3, german]


def test_labelled_texts():
    tokenizer, model = opened(tiny_family("model", "bert-classifier"))
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    text = LabelledText(Path("t"), ("1", "0"), ("the hen", "no"), ("ten", "on no"), (1, 2))
    batch = whole(labelled_examples(tokenizer, model, text))
    assert batch["labels"].tolist() == [1, 0]
    assert set(batch) == {"input_ids", "attention_mask", "labels", "token_type_ids"}
    assert batch["input_ids"].shape == batch["token_type_ids"].shape
    assert set(batch["token_type_ids"].unique().tolist()) == {0, 1}


def test_hidden_tokens(models):
    tokenizer, model = opened(models["bert"])
    examples = mlm_examples(tokenizer, model, ["the hen no ten on then " * 3, "", "no"], seed=3)
    assert len(examples.lengths) == 2  # the blank one has nothing to hide
    plain = [tokenizer(text)["input_ids"] for text in ("the hen no ten on then " * 3, "no")]
    seen = []
    for epoch in (0, 1, 0):
        examples.set_epoch(epoch)
        batch = whole(examples)
        seen.append(batch)
        hidden = batch["labels"] != -100
        assert bool(hidden.any(dim=1).all())
        for row, ids in enumerate(plain):
            kept = torch.where(hidden[row], batch["labels"][row], batch["input_ids"][row])[: len(ids)]
            assert kept.tolist() == ids
            assert not any(hidden[row, place] for place, token in enumerate(ids) if token in (0, 1, 2))
    assert torch.equal(seen[0]["input_ids"], seen[2]["input_ids"])
    assert not torch.equal(seen[0]["input_ids"], seen[1]["input_ids"])
    # What is hidden in a text does not depend on its batch.
    assert torch.equal(examples.batch([1]).labels[0], seen[2]["labels"][1, : len(plain[1])])


def test_how_tokens_are_hidden(models):
    """15 % of the tokens; of these 80 % by the mask, 10 % by another token, 10 % not (1810.04805, 3.1)."""
    tokenizer, model = opened(models["bert"])
    examples = mlm_examples(tokenizer, model, ["the hen no ten on then he " * 4] * 400, seed=0)
    batch = whole(examples)
    hidden = batch["labels"] != -100
    words = batch["attention_mask"].sum() - 2 * len(examples.lengths)
    assert float(hidden.sum() / words) == pytest.approx(0.15, abs=0.01)
    by_mask = batch["input_ids"][hidden] == tokenizer.mask_token_id
    same = batch["input_ids"][hidden] == batch["labels"][hidden]
    assert float(by_mask.float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float(same.float().mean()) == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("key", ["pad_token_id", "decoder_start_token_id"])
@pytest.mark.parametrize("family", ["t5", "m2m_100"])
def test_inputs_of_decoders_want_both_tokens(models, family, key):
    model = load(models[family])
    setattr(model.config, key, None)
    if not hasattr(type(model.config), key):
        delattr(model.config, key)
    with pytest.raises(CheckpointError, match=f"no {key}"):
        decoder_inputs(model, torch.tensor([[5, 6, 1]]))


def test_inputs_of_decoders_whose_config_has_the_tokens_elsewhere():
    model = tiny.build("t5gemma")
    assert getattr(model.config, "decoder_start_token_id", None) is None
    found = decoder_inputs(model, torch.tensor([[5, 6, 1]]))
    assert found.tolist() == [[model.config.decoder.bos_token_id, 5, 6]]


LINES = ("the tin", "the hen")
PAIR = ("eng_Latn", "fra_Latn")
TEXT = ParallelText("t", {"eng_Latn": ("the tin", "the"), "fra_Latn": ("ten", "hen")})
LABELLED = LabelledText(Path("t"), ("LABEL_0", "LABEL_1"), LINES, None, (1, 2))


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """(family, special tokens) -> its tokenizer with these, or with "hen", and the model without."""

    def made(family, /, cls=None, **special):
        changes = {} if cls is None else {"architectures": [cls], "num_labels": 2}
        path = tiny_family(tmp_path_factory.mktemp("models") / family, family, **changes)
        tokenizer = load_tokenizer(path)
        if special:
            tokenizer.add_special_tokens(special)
        else:
            tokenizer.add_tokens(["hen"])
        return tokenizer, load(path)

    return made


USES = {
    "sentences": ("m2m_100", lambda words, model: translation_examples(words, model, TEXT, [PAIR])),
    "translation": ("m2m_100", lambda words, model: translate(model, words, LINES, PAIR, DecodingOptions())),
    "labelled": ("bert", lambda words, model: labelled_examples(words, model, LABELLED)),
    "texts": ("gpt2", lambda words, model: text_examples(words, model, LINES)),
    "windows": ("gpt2", lambda words, model: lm_windows(words, model, LINES)),
    "packed": ("gpt2", lambda words, model: packed_examples(words, model, LINES)),
    "masked": ("bert", lambda words, model: mlm_examples(words, model, LINES)),
    "corpus": (
        "gpt2",
        lambda words, model: text_windows(
            words, Corpus("a", (), LINES), 8, vocabulary=model.config.vocab_size
        ),
    ),
}


@pytest.mark.parametrize("use", USES)
def test_an_added_token_is_refused_where_texts_are_encoded(make, use):
    family, call = USES[use]
    tokenizer, model = make(family, "BertForSequenceClassification" if use == "labelled" else None)
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
def test_so_is_a_special_token_that_prunecli_puts_in(make, family, special, use):
    tokenizer, model = make(family, **{special: "[NEW]"})
    with pytest.raises(CheckpointError, match=r"gives the id \d+ \('\[NEW\]'\)"):
        use(tokenizer, model, LINES)


def test_an_unknown_word_without_an_unknown_token_is_refused(make):
    class Without:
        name_or_path = "here"
        unk_token_id = bos_token_id = eos_token_id = pad_token_id = None

        def __call__(self, text: list[str]) -> dict[str, list[list[int | None]]]:
            return {"input_ids": [[3, None]]}

    assert encode(Without(), ["a"], "eng_Latn") == [[3, None]]
    with pytest.raises(CheckpointError, match="here: the tokenizer gives the id None, and"):
        encode(Without(), ["a"], "eng_Latn", vocabulary=9)


@pytest.mark.parametrize("value", [[1], -1, float("nan")])
def test_a_length_of_texts_that_is_none_is_refused(make, value):
    tokenizer, model = make("gpt2")
    tokenizer.model_max_length = value
    with pytest.raises(CheckpointError, match=r"model_max_length is .*, not a number of tokens"):
        text_examples(tokenizer, model, ["the tin"])


def test_a_padding_token_of_the_tokenizer_alone_is_not_used(make):
    """Many language models got a padding token later; the values of padding do not matter."""
    tokenizer, model = make("gpt2", pad_token="[PAD]")
    model.config.pad_token_id = None
    assert tokenizer.pad_token_id == model.config.vocab_size
    assert padding_id(model, tokenizer) == tokenizer.eos_token_id


@pytest.mark.parametrize(("key", "value"), [("pad_token_id", -7), ("decoder_start_token_id", -1)])
def test_negative_ids_in_config_json(make, key, value):
    tokenizer, model = make("m2m_100")
    setattr(model.config, key, value)
    with pytest.raises(CheckpointError, match=f"{key} is {value}; the model has the tokens 0 to"):
        translation_examples(tokenizer, model, TEXT, [PAIR])


def test_a_decoder_alone_does_not_begin_with_its_bos(make):
    """Published GPT-2s of other alphabets keep the ids of the first one."""
    _, model = make("gpt2")
    model.config.bos_token_id = 50256
    encoding.require_task(model, "lm")


def test_led_has_positions_of_its_own_for_each_stack():
    model = cutting.saved("led", ".", "seq2seq")
    model.config.max_decoder_position_embeddings = 32
    write_plain_tokenizer(".")
    text = ParallelText("val", {name: ["the hat " * 40] for name in ("a", "b")})
    assert translation_examples(load_tokenizer(Path()), model, text, [("a", "b")]).lengths == [(63, 31)]


def test_labels_stay_where_a_class_shifts_them_in_place():
    model = cutting.saved("fsmt", ".", "seq2seq")
    model.config.decoder_start_token_id = model.config.eos_token_id
    write_plain_tokenizer(".")
    text = ParallelText("val", {name: ["the hat", "the hen is on the hat"] for name in ("a", "b")})
    examples = translation_examples(load_tokenizer(Path()), model, text, [("a", "b")])
    counts = [int((batch.labels >= 0).sum()) for batch in examples.batches(1000)]
    assert counts == [sum(length for _, length in examples.lengths)]


@pytest.mark.parametrize(
    "head",
    [
        *(f"MobileBert{head}" for head in ("ForMaskedLM", "Model", "ForSequenceClassification")),
        "XLNetForSequenceClassification",
    ],
)
def test_no_text_is_padded_where_padding_mixes_into_texts(head):
    cls = getattr(transformers, head)
    model = cls(tiny.tiny_config(cls.config_class.model_type))
    write_plain_tokenizer(".")
    tokenizer, texts = load_tokenizer(Path()), ("the hat", "the hen is on the hat", "the rat")
    examples: Examples
    if head.endswith("ForSequenceClassification"):
        labelled = LabelledText(Path("t"), ("LABEL_0",) * 3, texts, None, (1, 2, 3))
        examples = labelled_examples(tokenizer, model, labelled)
    elif head.endswith("Model"):
        examples = embedding_examples(tokenizer, model, Pooling(), texts, None)
    else:
        examples = mlm_examples(tokenizer, model, texts)
    batches = examples.batches(1000)
    assert all(bool(batch.inputs["attention_mask"].all()) for batch in batches)
    assert sum(len(batch.inputs["input_ids"]) for batch in batches) == 3


def test_the_types_that_mix_padding_into_texts_are_known():
    for model_type in ("bert", "fnet", "mobilebert", "convbert", "electra", "longformer"):
        model = tiny.build(model_type, head="masked")
        ids = torch.randint(10, 60, (1, 5), generator=torch.Generator().manual_seed(0))
        padded, mask = functional.pad(ids, (0, 4), value=1), functional.pad(torch.ones_like(ids), (0, 4))
        with torch.no_grad():
            found = model(input_ids=padded, attention_mask=mask)[0][:, :5]
            expected = model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
        assert (float((found - expected).abs().max()) > 1e-3) == (model_type in encoding.MIXING)


@pytest.mark.parametrize("model_type", ["camembert", "ibert", "mpt"])
def test_all_positions_are_counted_and_no_more(model_type):
    model = tiny.build(model_type)
    ids = torch.full((1, encoding.position_count(model) + 1), 20)
    model(input_ids=ids[:, :-1])
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids)


@pytest.mark.parametrize("model_type", ["bert", "cpmant", "gpt_neox", "llama", "opt", "xlnet"])
def test_classes_that_see_the_next_token_do_not_predict_it(model_type):
    config = tiny.tiny_config(model_type, "causal")
    config.is_decoder = False
    model = tiny.drawn(tiny.auto_class(model_type, "causal"), config)
    ids = torch.arange(10, 20)[None]
    with torch.no_grad():
        one, other = (model(input_ids=functional.pad(ids, (0, 1), value=last))[0][:, :9] for last in (5, 6))
    sees = float((one - other).abs().max()) > 1e-6
    model.save_pretrained("model")
    assert training_task_of(open_model("model")) == ("feature-extraction" if sees else "lm")
    with pytest.raises(UnsupportedModelError, match="sees the tokens") if sees else nullcontext():
        require_task(model, "lm")
