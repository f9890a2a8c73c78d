"""Causal language models against the first of them: which are compared, by which texts, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from prunecli.errors import DataError, MemoryShortError, UsageError
from prunecli.evaluation import divergence
from prunecli.evaluation.evaluate import evaluate_data
from prunecli.evaluation.options import EvaluationOptions
from prunecli.modules import fitting
from prunecli.modules.loading import load_model
from prunecli.modules.logits import BLOCK_VALUES
from prunecli.running.batches import run_forward
from prunecli.text.choice import Dataset
from prunecli.text.plain import PlainText
from prunecli.text.tokens import load_tokenizer
from tests.families import tiny_family
from tests.reference import divergence as reference
from tests.reference.losses import causal_nll

LINES = ("the hat on a hen", "no", "then ten of the hats are on", "a hen in the inn")
TEXT = PlainText((Path("a.txt"), Path("b.txt")), LINES, ("a", "a", "b", "b"))
OPTIONS = EvaluationOptions(batch_tokens=64, max_new_tokens=5, device="cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("causal")
    return {name: tiny_family(folder / name, "llama", seed=n) for n, name in enumerate(("full", "pruned"))}


def results(checkpoints: dict[str, Path], text: PlainText = TEXT, **more: Any) -> list[dict[str, Any]]:
    options = EvaluationOptions(**{**vars(OPTIONS), **more})
    return list(evaluate_data(checkpoints, Dataset("lm", text), options).to_json()["results"])


def test_by_name_and_in_all(models: dict[str, Path]) -> None:
    first, other = results(models)
    loaded = [load_model(path, device="cpu") for path in models.values()]
    tokenizer = load_tokenizer(models["full"])
    for name, rows in (("a", (0, 1)), ("b", (2, 3)), (None, range(4))):
        ids = [tokenizer(LINES[row])["input_ids"] for row in rows]
        count = sum(len(one) - 1 for one in ids)
        kl = agreed = 0.0
        early: list[float] = []
        for one in ids:
            both = [reference.distributions(model, one, len(one) - 1) for model in loaded]
            for place, (p, q) in enumerate(zip(*both, strict=True), start=1):
                kl += reference.divergence(p, q)
                early += [reference.divergence(p, q)] if place in (2, 3) else []
                agreed += reference.top(p) == reference.top(q)
        for result, model in zip((first, other), loaded, strict=True):
            scores = result["scores"] if name is None else result["by_text"][name]
            nats = sum(causal_nll(model, one, len(one) - 1) for one in ids)
            assert scores["loss"] == pytest.approx(nats / count, abs=2e-6)
            assert scores["tokens"] == count
            assert ("kl_divergence" in scores) == ("by_position" in scores) == (result is other)
        assert scores["kl_divergence"] == pytest.approx(kl / count, abs=2e-6)
        one, few, *_ = scores["by_position"]
        assert (one["first"], one["last"], one["tokens"]) == (1, 1, len(ids))
        assert (few["first"], few["last"], few["tokens"]) == (2, 3, len(early))
        assert few["kl_divergence"] == pytest.approx(sum(early) / len(early), abs=2e-6)
        assert sum(span["tokens"] for span in scores["by_position"]) == count
        assert scores["top1_agreement"] == pytest.approx(agreed / count, abs=2e-6)
    assert list(other["by_text"]) == ["a", "b"]


def test_continuations(models: dict[str, Path], tmp_path: Path) -> None:
    same = tiny_family(tmp_path / "same", "llama", seed=0)
    first, other, itself = results({**models, "same": same}, continuations=2)
    assert "continuations" not in first["scores"]
    for scores in (itself["scores"], *itself["by_text"].values()):
        assert scores["tokens_until_difference"] == scores["continued_tokens"] > 0
        assert scores["equal_tokens"] == 1
        assert scores["kl_divergence"] == 0
        assert scores["top1_agreement"] == 1
    assert [own["continuations"] for own in other["by_text"].values()] == [2, 2]
    assert other["scores"]["continuations"] == 4
    assert other["scores"]["equal_tokens"] < 1
    means = [own["tokens_until_difference"] for own in other["by_text"].values()]
    assert other["scores"]["tokens_until_difference"] == pytest.approx(sum(means) / 2)


def renamed(path: Path) -> Path:
    """A tokenizer whose last token is called otherwise."""
    file = path / "tokenizer.json"
    vocabulary = Tokenizer.from_file(str(file)).get_vocab()
    last = max(vocabulary, key=lambda token: (len(token), vocabulary[token]))
    file.write_text(file.read_text().replace(f'"{last}"', f'"{last}x"'))
    return path


def test_other_tokens_are_not_compared(models: dict[str, Path], tmp_path: Path) -> None:
    other = {"full": models["full"], "other": renamed(tiny_family(tmp_path / "other", "llama", seed=1))}
    said: list[str] = []
    made = evaluate_data(other, Dataset("lm", TEXT), OPTIONS, say=said.append).results[1]
    assert made.scores["perplexity"] > 1
    assert "kl_divergence" not in made.scores
    line = "other: no comparison of next tokens with full: its tokenizer has other tokens"
    assert f"{line}." in said
    with pytest.raises(UsageError, match=line):
        results(other, continuations=2)


def head_of(path: Path) -> int:
    """Bytes in float32 of the matrix that logits are made with."""
    head = load_model(path, device="cpu").get_output_embeddings().weight
    return 4 * head.shape[0] * head.shape[1]


def test_the_first_models_head_is_held_beside_the_others(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(models["full"], device="cpu")
    weights, head = 4 * sum(value.numel() for value in model.parameters()), head_of(models["full"])
    options = OPTIONS.model_copy(update=dict(dtype="float32"))
    monkeypatch.setattr(fitting, "new_memory", lambda _device: free)
    free = -(-(weights + head) * 10 // 9)
    assert len(evaluate_data(models, Dataset("lm", TEXT), options).results) == 2
    free = (weights + head) * 10 // 9 - 1
    with pytest.raises(MemoryShortError, match=r"pruned: needs .*head of the first model"):
        evaluate_data(models, Dataset("lm", TEXT), options)
    assert len(evaluate_data({"full": models["full"]}, Dataset("lm", TEXT), options).results) == 1


def test_layer_by_layer_it_is_in_the_budget(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def run(*arguments: Any, beside: int = 0, **options: Any) -> None:
        counted.append(beside)
        run_forward(*arguments, beside=beside, **options)

    monkeypatch.setattr(divergence, "run_forward", run)
    results(models, memory=4 << 30)
    assert counted == [0, head_of(models["full"]) + 2 * 4 * BLOCK_VALUES]


def test_a_text_in_which_nothing_is_predicted(models: dict[str, Path]) -> None:
    text = PlainText(TEXT.files, ("the hat", ""), ("long", "short"))
    with pytest.raises(DataError, match="short: the text has no token to predict"):
        results(models, text)
