"""`evaluate --task embedding`: vectors beside transformers' own, and what they are worth."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import DataError, UnsupportedModelError, UsageError
from prunecli.evaluation.evaluate import evaluate
from prunecli.evaluation.options import EvaluationOptions
from prunecli.evaluation.tasks import cosines, retrieved
from prunecli.text.choice import TextChoice
from tests.families import tiny_family
from tests.sentence_model import sentence_model

TEXTS = ["a dog runs", "two men sit on a bench", "a", "the bench is red", "a dog on a red bench", "men run"]
OPTIONS = EvaluationOptions(device="cpu", dtype="float32")


@pytest.fixture
def models(tmp_path):
    return {name: sentence_model(tmp_path / name, seed=seed) for name, seed in (("one", 0), ("other", 1))}


def texts_in(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def vectors_of(directory: Path, texts: list[str]) -> np.ndarray:
    """One text after another by transformers, the mean of its tokens."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    found = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=24, return_tensors="pt")
        with torch.inference_mode():
            found.append(model(**inputs).last_hidden_state[0].mean(0).numpy())
    return np.stack(found)


def cosine_table(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.array([[a @ b / np.sqrt((a @ a) * (b @ b)) for b in second] for a in first.astype(np.float64)])


def plain(directory: Path) -> Path:
    """Without the dense layer, whose vectors would hide the others."""
    modules = json.loads((directory / "modules.json").read_text())
    kept = [module for module in modules if not module["type"].endswith("Dense")]
    (directory / "modules.json").write_text(json.dumps(kept))
    return directory


def test_cosine_to_the_first(models, tmp_path):
    paths = {name: plain(path) for name, path in models.items()}
    choice = TextChoice(files=(texts_in(tmp_path / "t.txt", TEXTS),))
    first, other = evaluate(paths, choice, OPTIONS).results
    assert evaluate(paths, choice, OPTIONS).task == "embedding"
    want = np.diag(cosine_table(*(vectors_of(path, TEXTS) for path in paths.values())))
    assert first.scores["cosine"] == 1.0
    assert other.scores["cosine"] == pytest.approx(want.mean(), abs=1e-5)
    assert other.scores["cosine_5_percent"] == pytest.approx(np.quantile(want, 0.05), abs=1e-5)


def test_scored_pairs(models, tmp_path):
    from scipy.stats import spearmanr

    scores = [3.5, 0, 1.25, 5]
    rows = [f"{score}\t{a}\t{b}" for score, a, b in zip(scores, TEXTS[:4], TEXTS[2:], strict=True)]
    path = plain(models["one"])
    choice = TextChoice(labelled=texts_in(tmp_path / "pairs.tsv", rows))
    (result,) = evaluate({"one": path}, choice, OPTIONS, task="embedding").results
    near = np.diag(cosine_table(vectors_of(path, TEXTS[:4]), vectors_of(path, TEXTS[2:])))
    assert result.scores["spearman"] == pytest.approx(spearmanr(scores, near).statistic, abs=1e-6)


def test_aligned_sentences(models, tmp_path):
    for language, lines in (("eng_Latn", TEXTS), ("deu_Latn", [f"{text} red" for text in TEXTS])):
        texts_in(tmp_path / f"test.{language}", lines)
    choice = TextChoice(data=tmp_path, split="test", pairs="eng_Latn-deu_Latn")
    paths = {name: plain(path) for name, path in models.items()}
    found = evaluate(paths, choice, OPTIONS, task="embedding")
    for path, result in zip(paths.values(), found.results, strict=True):
        table = cosine_table(vectors_of(path, TEXTS), vectors_of(path, [f"{text} red" for text in TEXTS]))
        want = np.mean(table.argmax(axis=1) == np.arange(len(TEXTS)))
        assert result.scores["retrieval"] == pytest.approx(want, abs=1e-6)
        assert result.scores["retrieval_by_pair"] == {"eng_Latn-deu_Latn": result.scores["retrieval"]}
    assert found.significance is not None
    assert found.results[1].p_value is not None


@given(st.integers(1, 12), st.integers(0, 2**31))
def test_nearest_rows(count, seed):
    draw = np.random.default_rng(seed)
    ones, others = draw.normal(size=(2, count, 3)).astype(np.float32)
    table = cosine_table(ones, others)
    np.testing.assert_allclose(cosines(ones, others), np.diag(table), atol=1e-6)
    np.testing.assert_array_equal(retrieved(ones, others), table.argmax(axis=1) == np.arange(count))


def test_what_cannot_be_measured_is_refused(models, tmp_path):
    text = texts_in(tmp_path / "t.txt", TEXTS)
    single = TextChoice(labelled=texts_in(tmp_path / "one.tsv", ["1\ta", "2\tb"]))
    odd = TextChoice(labelled=texts_in(tmp_path / "odd.tsv", ["1\ta\tb", "much\tb\tc"]))
    same = TextChoice(labelled=texts_in(tmp_path / "same.tsv", ["1\ta\tb", "1\tb\tc"]))
    for choice, message in (
        (single, "one text a line"),
        (odd, "line 2: 'much' is no similarity"),
        (same, "all pairs are equally similar"),
    ):
        with pytest.raises(DataError, match=message):
            evaluate({"one": models["one"]}, choice, OPTIONS, task="embedding")
    for choice, message in (
        (TextChoice(), "embedding needs text"),
        (TextChoice(files=(text,), labelled=text), "several kinds"),
    ):
        with pytest.raises(UsageError, match=message):
            evaluate({"one": models["one"]}, choice, OPTIONS, task="embedding")
    pair = tiny_family(tmp_path / "pair", "m2m_100")
    with pytest.raises(UnsupportedModelError, match="so that a text has no vector"):
        evaluate({"pair": pair}, TextChoice(files=(text,)), OPTIONS, task="embedding")
