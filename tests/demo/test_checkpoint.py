from fractions import Fraction

import pytest
import torch
from sacrebleu.metrics import CHRF
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from prunecli.demo import CHECKPOINT, DATA, LM_CHECKPOINT
from prunecli.evaluation.decoding import DecodingOptions, translate
from prunecli.methods.experts.collect import collect_gates
from prunecli.methods.experts.metrics import aggregate, metric_values
from prunecli.methods.units import drawn
from prunecli.model.checkpoint import open_model
from prunecli.model.find_axes import axes_of
from prunecli.modules.loading import load_model, sparse_ffns
from prunecli.selection.select import Budget, select
from prunecli.text.choice import TextChoice
from prunecli.text.parallel import read_parallel
from prunecli.text.tokens import load_tokenizer
from tests.gates import choose_among
from tests.tiny import config_of, json_of
from tools.demo import train
from tools.demo.languages import BY_CODE
from tools.demo.model import SIZES


@pytest.fixture(scope="module")
def config():
    return config_of(CHECKPOINT)


@pytest.mark.parametrize(("folder", "most"), [(CHECKPOINT, 6_000_000), (LM_CHECKPOINT, 700_000)])
def test_the_directories_are_small_and_complete(folder, most):
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    settings = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert set(files) == {"README.md", "model.safetensors"} | settings
    assert sum(files.values()) < most


def test_the_stock_class_finds_every_tensor():
    _, report = AutoModelForSeq2SeqLM.from_pretrained(
        CHECKPOINT, output_loading_info=True, local_files_only=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("code", BY_CODE)
def test_the_tokenizer_gives_every_sentence_back(code, config):
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, src_lang=code, local_files_only=True)
    assert type(tokenizer).__name__ == "NllbTokenizer"
    assert len(tokenizer) == config["vocab_size"]
    sentences = (DATA / f"test.{code}").read_text(encoding="utf-8").splitlines()
    for ids, sentence in zip(tokenizer(sentences)["input_ids"], sentences, strict=True):
        assert ids[0] == tokenizer.convert_tokens_to_ids(code)
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == sentence


# What the README's table says of it: by language costs least, globally more, at random most.


CHOSEN = ("qba_Latn", "qka_Latn", "qna_Latn", "qno_Latn")
DIRECTIONS = [("qba_Latn", "qka_Latn"), ("qka_Latn", "qna_Latn"), ("qna_Latn", "qba_Latn")]


@pytest.fixture(scope="module")
def scores():
    """chrF++ of 12 test sentences in three directions, greedy, 80 % of the experts removed, balanced."""
    model, tokenizer = load_model(CHECKPOINT, device="cpu"), load_tokenizer(CHECKPOINT)
    opened = open_model(CHECKPOINT)
    choice = TextChoice(data=DATA, langs=",".join(CHOSEN), max_sentences=60)
    gates = collect_gates(opened, choice, device="cpu").statistics
    axes = axes_of(opened, "expert")
    budget = Budget(0.8, balance=Fraction(1))
    values = {
        "global": metric_values("importance", aggregate(gates, "global"), gates),
        "random": drawn(axes, seed=0).values,
    }
    text = read_parallel(DATA, "test", CHOSEN).first(12)
    found = {}
    for way in ("full", "language", "global", "random"):
        made, wanted = [], []
        for pair in DIRECTIONS:
            if way == "language":
                values[way] = metric_values("importance", aggregate(gates, way, pair[:1], pair[1:]), gates)
            for name, module in sparse_ffns(model).items():
                if way != "full":
                    choose_among(module, select(axes, values[way], budget)[0][f"{name}.experts"])
            options = DecodingOptions(beam=1, max_new_tokens=50)
            outputs = translate(model, tokenizer, text.sentences[pair[0]], pair, options)
            made += [output.text for output in outputs]
            wanted += text.sentences[pair[1]]
        found[way] = CHRF(word_order=2).corpus_score(made, [wanted]).score
    return found


def test_the_model_translates(scores):
    assert scores["full"] > 75


def test_by_language_costs_less_than_3_points(scores):
    assert scores["full"] - scores["language"] < 3


def test_language_beats_global_beats_random(scores):
    assert scores["language"] > scores["global"] + 10 > scores["random"] + 20


# The training script writes a directory that loads, with the bundled sizes and tokenizer.


def test_two_steps_write_a_directory_that_loads(tmp_path, monkeypatch):
    """On the first 4,000 lines: all 24,000 take seconds to learn the tokenizer from and to encode."""
    monkeypatch.setattr(train, "read_parallel", lambda data, split: read_parallel(data, split).first(4000))
    train.main(["--output", str(tmp_path), "--steps", "2", "--sentences", "8", "--threads", "1"])
    model = load_model(tmp_path, device="cpu")
    ids = torch.tensor([[800, 10, 11, 2]])
    logits = model(input_ids=ids, decoder_input_ids=ids).logits
    assert logits.shape == (1, 4, model.config.vocab_size)
    assert torch.isfinite(logits).all()
    for path in (tmp_path, CHECKPOINT):
        assert SIZES.items() <= config_of(path).items()
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert json_of(tmp_path / name) == json_of(CHECKPOINT / name)
