import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer

from prunecli.errors import CheckpointError, DataError, OutputError, UnsupportedModelError, UsageError
from prunecli.evaluation.evaluate import evaluate
from prunecli.evaluation.options import EvaluationOptions
from prunecli.evaluation.scoring import mcnemar_test, paired_t_test
from prunecli.evaluation.tasks import class_scores, perplexity
from prunecli.model.checkpoint import open_model
from prunecli.modules.stock_experts import own_experts
from prunecli.running.batches import batch_cost
from prunecli.running.examples import Batch
from prunecli.running.layerwise.runner import Layerwise
from prunecli.running.runner import InMemory
from prunecli.text.choice import Dataset, TextChoice
from prunecli.text.plain import read_labelled, read_plain
from prunecli.text.tokens import load_tokenizer
from tests.evaluation.losses import losses
from tests.families import full_and_pruned, tiny_family
from tests.opening import load
from tests.reference.losses import logits_of, nll
from tests.reference.scoring import matthews
from tests.sentence_model import sentence_model
from tests.stock_mixtures import save_mixture
from tests.tiny import json_of, tiny_nllb_moe

OPTIONS = EvaluationOptions(batch_tokens=64, device="cpu", seed=4)


@pytest.fixture(scope="module")
def causal(shared_path):
    return full_and_pruned(shared_path, "gpt2")


@pytest.fixture(scope="module")
def classifiers(shared_path):
    classifier = {"architectures": ["BertForSequenceClassification"], "num_labels": 3}
    return full_and_pruned(shared_path, "bert", **classifier)


@pytest.fixture(scope="module")
def text(shared_path):
    (shared_path / "text.txt").write_text("the hat on a hen\n\nno\nthen ten of the hats are on\n")
    return read_plain([shared_path / "text.txt"])


def test_language_models_side_by_side(causal, text):
    output = Path("evaluation.json")
    payload = evaluate(causal, Dataset("lm", text), OPTIONS, output).to_json()
    assert json_of(output) == payload
    assert payload["format"] == "prunecli.evaluation/1"
    assert payload["task"] == "lm"
    assert payload["seed"] is None
    described = {"files": ["text.txt"], "texts": 3, "sha256": text.sha256, "whole_files": False}
    assert payload["data"] == described
    test = {"test": "paired t-test", "of": "bits_per_byte", "level": 0.05, "baseline": "full", "examples": 3}
    assert payload["significance"] == test
    bits = []
    for (label, path), row in zip(causal.items(), payload["results"], strict=True):
        nats, tokens = losses(path, text.texts)
        assert row["checkpoint"] == label
        loss = nats.sum() / tokens.sum()
        assert row["scores"]["perplexity"] == pytest.approx(perplexity(loss), abs=1e-4)
        whole = nats.sum() / math.log(2)  # "no" has a token that is predicted, from the start token
        assert row["scores"]["bits_per_byte"] == pytest.approx(whole / sum(map(len, text.texts)), abs=1e-5)
        bits.append([n / len(line) for n, line in zip(nats, text.texts, strict=True)])
    assert "p_value" not in payload["results"][0]
    assert payload["results"][1]["p_value"] == pytest.approx(paired_t_test(*bits), abs=1e-5)


def test_classifiers_side_by_side(classifiers):
    Path("text.tsv").write_text("0\tthe hat\n1\tno\n2\tthen ten of the hats\n0\ta hen\n")
    labelled = read_labelled(Path("text.tsv"))
    payload = evaluate(classifiers, Dataset("classification", labelled), OPTIONS).to_json()
    right, labels = [], np.array([0, 1, 2, 0])
    for row, path in zip(payload["results"], classifiers.values(), strict=True):
        model, tokenizer = load(path), load_tokenizer(path)
        logits = [logits_of(model, input_ids=tokenizer(text)["input_ids"]) for text in labelled.texts]
        chosen = np.array([int(np.argmax(one)) for one in logits])
        by_class, _ = class_scores(chosen, labels)
        right.append(chosen == labels)
        losses = [nll(one, int(label)) for one, label in zip(logits, labels, strict=True)]
        assert row["scores"]["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
        assert row["scores"]["accuracy"] == pytest.approx((chosen == labels).mean())
        assert row["scores"]["f1"] == pytest.approx(sum(by_class.values()) / len(by_class), abs=1e-6)
        correlation = matthews(labels.tolist(), chosen.tolist())
        assert row["scores"]["matthews"] == pytest.approx(correlation, abs=1e-6)
        assert set(row["scores"]["f1_by_class"]) == {f"LABEL_{number}" for number in by_class}
    assert payload["results"][1]["p_value"] == pytest.approx(mcnemar_test(*right), abs=1e-6)
    assert payload["significance"]["test"] == "McNemar, exact"


def test_the_windows_of_documents_are_compared(causal, text):
    whole = read_plain(text.files, whole_files=True)
    payload = evaluate(causal, Dataset("lm", whole), OPTIONS, "one.json").to_json()
    assert (payload["data"]["texts"], payload["significance"]["examples"]) == (1, 1)
    assert payload["results"][1]["p_value"] is None
    payload = evaluate(causal, Dataset("lm", whole, context=9), OPTIONS).to_json()
    nats = []
    for path in causal.values():
        sums, counts = losses(path, whole.texts, context=9)
        nats.append(sums / counts)
    assert payload["significance"]["examples"] == len(nats[0]) > 2
    assert payload["significance"]["test"] == "paired t-test over the windows' losses"
    assert payload["results"][1]["p_value"] == pytest.approx(paired_t_test(*nats), abs=1e-6)


def test_refused_before_a_model_is_loaded(causal, classifiers, text, monkeypatch):
    monkeypatch.setattr("prunecli.running.layerwise.runner.load_model", None)  # not called
    Path("e.json").write_text("{}")
    with pytest.raises(OutputError, match="exists"):
        evaluate(causal, Dataset("lm", text), OPTIONS, "e.json")
    with pytest.raises(OutputError, match="no such directory"):
        evaluate(causal, Dataset("lm", text), OPTIONS, "nowhere/e.json")
    with pytest.raises(CheckpointError, match="nothing"):
        evaluate({**causal, "x": "nothing"}, Dataset("lm", text), OPTIONS, "new.json")
    Path("bad.tsv").write_text("7\ta\n")
    bad = Dataset("classification", read_labelled(Path("bad.tsv")))
    with pytest.raises(DataError, match="knows no label '7'"):
        evaluate(classifiers, bad, OPTIONS, "new.json")
    assert not Path("new.json").exists()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_matthews_correlation_against_its_definition(pairs):
    chosen, labels = zip(*pairs, strict=True)
    by_class, found = class_scores(np.array(chosen), np.array(labels))
    assert found == pytest.approx(matthews(labels, chosen), abs=1e-9)
    for one, value in by_class.items():
        called, right = ([value == one for value in own] for own in (chosen, labels))
        hits = sum(a and b for a, b in zip(called, right, strict=True))
        assert value == pytest.approx(2 * hits / (sum(called) + sum(right)))


TEXTS = ["a dog runs", "two men sit on a bench", "a", "the bench is red", "a dog on a red bench", "men run"]
VECTORS = EvaluationOptions(device="cpu", dtype="float32")


@pytest.fixture
def models():
    return {n: sentence_model(n, is_dense=False, seed=seed) for seed, n in enumerate(("one", "other"))}


def texts_in(path: str, lines: list[str]) -> str:
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def vectors_of(directory: Path, texts: list[str]) -> np.ndarray:
    """One text after another by transformers, the mean of its tokens."""
    model, tokenizer = AutoModel.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    found = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=24, return_tensors="pt")
        with torch.inference_mode():
            found.append(model(**inputs).last_hidden_state[0].mean(0).numpy())
    return np.stack(found)


def cosine_table(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.array([[a @ b / np.sqrt((a @ a) * (b @ b)) for b in second] for a in first.astype(np.float64)])


def test_cosine_to_the_first(models):
    choice = TextChoice(files=(texts_in("t.txt", TEXTS[:2]), texts_in("u.txt", TEXTS[2:])), names=("t", "u"))
    found = evaluate(models, choice, VECTORS)
    assert found.task == "embedding"
    first, other = found.results
    want = np.diag(cosine_table(*(vectors_of(path, TEXTS) for path in models.values())))
    assert first.scores["cosine"] == 1.0
    assert other.scores["cosine"] == pytest.approx(want.mean(), abs=1e-5)
    assert other.scores["cosine_5_percent"] == pytest.approx(np.quantile(want, 0.05), abs=1e-5)
    assert other.by_text["t"]["cosine"] == pytest.approx(want[:2].mean(), abs=1e-5)


def test_scored_pairs(models):
    scores = [3.5, 0, 1.25, 5]
    rows = [f"{score}\t{a}\t{b}" for score, a, b in zip(scores, TEXTS[:4], TEXTS[2:], strict=True)]
    path = models["one"]
    choice = TextChoice(labelled=texts_in("pairs.tsv", rows))
    (result,) = evaluate({"one": path}, choice, VECTORS, task="embedding").results
    near = np.diag(cosine_table(vectors_of(path, TEXTS[:4]), vectors_of(path, TEXTS[2:])))
    assert result.scores["spearman"] == pytest.approx(spearmanr(scores, near).statistic, abs=1e-6)


def test_aligned_sentences(models):
    for language, lines in (("eng_Latn", TEXTS), ("deu_Latn", [f"{text} red" for text in TEXTS])):
        texts_in(f"test.{language}", lines)
    choice = TextChoice(data=".", split="test", pairs="eng_Latn-deu_Latn")
    found = evaluate(models, choice, VECTORS, task="embedding")
    for path, result in zip(models.values(), found.results, strict=True):
        table = cosine_table(vectors_of(path, TEXTS), vectors_of(path, [f"{text} red" for text in TEXTS]))
        want = np.mean(table.argmax(axis=1) == np.arange(len(TEXTS)))
        assert result.scores["retrieval"] == pytest.approx(want, abs=1e-6)
        assert result.scores["retrieval_by_pair"] == {"eng_Latn-deu_Latn": result.scores["retrieval"]}
    assert found.significance is not None
    assert found.results[1].p_value is not None


def test_what_cannot_be_measured_is_refused(models):
    text = texts_in("t.txt", TEXTS)
    single = TextChoice(labelled=texts_in("one.tsv", ["1\ta", "2\tb"]))
    odd = TextChoice(labelled=texts_in("odd.tsv", ["1\ta\tb", "much\tb\tc"]))
    same = TextChoice(labelled=texts_in("same.tsv", ["1\ta\tb", "1\tb\tc"]))
    for choice, error, message in (
        (single, DataError, "one text a line"),
        (odd, DataError, "line 2: 'much' is no similarity"),
        (same, DataError, "all pairs are equally similar"),
        (TextChoice(), UsageError, "embedding needs text"),
        (TextChoice(files=(text,), labelled=text), UsageError, "several kinds"),
    ):
        with pytest.raises(error, match=message):
            evaluate({"one": models["one"]}, choice, VECTORS, task="embedding")
    pair = tiny_family("pair", "m2m_100")
    with pytest.raises(UnsupportedModelError, match="so that a text has no vector"):
        evaluate({"pair": pair}, TextChoice(files=(text,)), VECTORS, task="embedding")


# Losses layer by layer are those of the whole model, to the last bit.


LINES = ("the hat on a hen", "no", "then ten of the hats " * 9, "a hen in the inn", "tin")
CPU, PLENTY = torch.device("cpu"), 1 << 34


def assert_layerwise(path: Path, wanted: tuple[np.ndarray, np.ndarray], task: str = "lm") -> None:
    checkpoint = open_model(path)
    runner = Layerwise(checkpoint, CPU, torch.float32, PLENTY, output=True)
    found = losses(path, LINES, runner, task)
    assert wanted[0].min() > 0
    assert np.array_equal(found, wanted)
    assert runner.report.readings == 1
    assert 0 < runner.report.bytes_read <= checkpoint.total_bytes


@pytest.mark.parametrize(("model_type", "task"), [("gpt2", "lm"), ("bert", "mlm")])
def test_families(model_type, task):
    path = tiny_family("model", model_type)
    assert_layerwise(path, losses(path, LINES, task=task), task)


def test_a_loss_that_is_not_finite_names_the_text():
    path = tiny_family("model", "gpt2")
    runner = Layerwise(open_model(path), CPU, torch.float32, PLENTY)
    final = runner.model.transformer.ln_f.register_forward_hook(lambda _m, _i, output: output * float("nan"))
    with pytest.raises(DataError, match="example 1: the loss is nan"):
        losses(path, LINES[:1], runner)
    final.remove()


def states_of(path: Path, source: int, target: int) -> list[tuple[int, ...]]:
    """Bytes of states of 2 translations with so many tokens: forwards, and with gradients."""
    ids, targets = (torch.ones(2, length, dtype=torch.long) for length in (source, target))
    batch = Batch({"input_ids": ids, "decoder_input_ids": targets}, targets, (0, 1))
    runner = Layerwise(open_model(path), CPU, torch.float32, PLENTY)
    return [batch_cost(runner, batch, backward=way).states for way in (False, True)]


def test_what_a_batch_takes_in_a_mixture_of_experts():
    forward, back = states_of(tiny_nllb_moe("a", layers=4), 5, 5)
    output, rows = 10 * 16 * 4, 10 * 2 * 16 * 4
    assert forward == (2 * (output + rows),)
    assert back == (2 * (5 * output + 2 * rows + 2 * rows),), "two sparse layers; rows and gradients of one"


# Losses of mixtures in their stock classes, layer by layer, are those of the whole model.


KINDS = ("gpt_oss", "granitemoehybrid", "qwen3_next")
"""Families with attentions, states or layouts of different kinds; gate statistics are collected of all by layer."""


@pytest.mark.parametrize("model_type", KINDS)
def test_every_kind_of_layer(model_type):
    path = save_mixture("model", model_type)
    model = load(path)
    with own_experts(model):  # added up in their order, as layer by layer
        wanted = losses(path, LINES, InMemory(model))
    assert_layerwise(path, wanted)
    np.testing.assert_allclose(wanted[0], losses(path, LINES)[0], rtol=1e-6)


def test_a_family_that_runs_whole_is_refused():
    path = save_mixture("model", "kimi_linear")
    Path("text").write_text("the hen\n")
    data = TextChoice(files=("text",)).read("lm")
    with pytest.raises(UsageError, match="a model of type kimi_linear is measured with the whole"):
        evaluate({"model": path}, data, EvaluationOptions(device="cpu", memory=PLENTY))
