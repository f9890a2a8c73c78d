from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig

from prunecli.errors import DataError, MemoryShortError, UsageError
from prunecli.evaluation import language_model
from prunecli.evaluation.evaluate import evaluate
from prunecli.evaluation.language_model import (
    NEW_TOKENS,
    PROMPT,
    Reference,
    choose_prompts,
    continue_greedily,
)
from prunecli.evaluation.options import EvaluationOptions
from prunecli.modules import fitting, logits
from prunecli.modules.logits import BLOCK_VALUES
from prunecli.running.batches import run_forward
from prunecli.running.encoding import Window, window_examples
from prunecli.running.examples import Batch
from prunecli.running.runner import InMemory
from prunecli.text.choice import Dataset
from prunecli.text.plain import PlainText
from prunecli.text.tokens import load_tokenizer
from tests.families import full_and_pruned, tiny, tiny_family
from tests.opening import load
from tests.reference import divergence as reference
from tests.reference.divergence import continued
from tests.reference.losses import causal_nll

CAUSAL_LINES = ("the hat on a hen", "no", "then ten of the hats are on", "a hen in the inn")
TEXT = PlainText((Path("a.txt"), Path("b.txt")), CAUSAL_LINES, ("a", "a", "b", "b"))
OPTIONS = EvaluationOptions(batch_tokens=64, max_new_tokens=5, device="cpu")


@pytest.fixture(scope="module")
def models(shared_path):
    return full_and_pruned(shared_path, "llama")


def results(checkpoints: dict[str, Path], text: PlainText = TEXT, **more: Any) -> list[dict[str, Any]]:
    options = EvaluationOptions(**{**vars(OPTIONS), **more})
    return list(evaluate(checkpoints, Dataset("lm", text), options).to_json()["results"])


def test_by_name_and_in_all(models):
    first, other = results(models)
    loaded = [load(path) for path in models.values()]
    tokenizer = load_tokenizer(models["full"])
    for name, rows in (("a", (0, 1)), ("b", (2, 3)), (None, range(4))):
        ids = [tokenizer(CAUSAL_LINES[row])["input_ids"] for row in rows]
        count = sum(len(one) - 1 for one in ids)
        places = [place for one in ids for place in reference.compared(loaded, one, len(one) - 1)]
        for result, model in zip((first, other), loaded, strict=True):
            scores = result["scores"] if name is None else result["by_text"][name]
            nats = sum(causal_nll(model, one, len(one) - 1) for one in ids)
            assert scores["loss"] == pytest.approx(nats / count, abs=2e-6)
            assert scores["tokens"] == count
            assert ("kl_divergence" in scores) == (result is other)
        assert scores["kl_divergence"] == pytest.approx(sum(value for value, _ in places) / count, abs=2e-6)
        assert scores["top1_agreement"] == pytest.approx(sum(same for _, same in places) / count, abs=2e-6)
    assert list(other["by_text"]) == ["a", "b"]


def test_continuations(models):
    same = tiny_family("same", "llama", seed=0)
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


def test_other_tokens_are_not_compared(models):
    other = {"full": models["full"], "other": renamed(tiny_family("other", "llama", seed=1))}
    said = []
    made = evaluate(other, Dataset("lm", TEXT), OPTIONS, say=said.append).results[1]
    assert made.scores["perplexity"] > 1
    assert "kl_divergence" not in made.scores
    line = "other: no comparison of next tokens with full: its tokenizer has other tokens"
    assert f"{line}." in said
    with pytest.raises(UsageError, match=line):
        results(other, continuations=2)


def head_of(path: Path) -> int:
    """Bytes in float32 of the matrix that logits are made with."""
    head = load(path).get_output_embeddings().weight
    return 4 * head.shape[0] * head.shape[1]


def test_the_first_models_head_is_held_beside_the_others(models, monkeypatch):
    model = load(models["full"])
    weights, head = 4 * sum(value.numel() for value in model.parameters()), head_of(models["full"])
    options = OPTIONS.updated(dtype="float32")
    monkeypatch.setattr(fitting, "new_memory", lambda _device: free)
    free = -(-(weights + head) * 10 // 9)
    assert len(evaluate(models, Dataset("lm", TEXT), options).results) == 2
    free = (weights + head) * 10 // 9 - 1
    with pytest.raises(MemoryShortError, match=r"pruned: needs .*head of the first model"):
        evaluate(models, Dataset("lm", TEXT), options)
    assert len(evaluate({"full": models["full"]}, Dataset("lm", TEXT), options).results) == 1


def test_layer_by_layer_it_is_in_the_budget(models, monkeypatch):
    counted = []

    def run(*arguments, beside=0, **options):
        counted.append(beside)
        run_forward(*arguments, beside=beside, **options)

    monkeypatch.setattr(language_model, "run_forward", run)
    results(models, memory=4 << 30)
    assert counted == [0, head_of(models["full"]) + 2 * 4 * BLOCK_VALUES]


def test_a_text_in_which_nothing_is_predicted(models):
    text = PlainText(TEXT.files, ("the hat", ""), ("long", "short"))
    with pytest.raises(DataError, match="short: the text has no token to predict"):
        results(models, text)


PROMPTS = [(5, 6, 7, 8), (9,), (11, 12, 13, 14), (20, 21), (30,)]


@pytest.fixture
def gpt2():
    path = tiny_family("model", "gpt2")
    return load(path), load_tokenizer(path)


def test_the_most_probable_tokens(gpt2):
    model, tokenizer = gpt2
    # The checkpoint's own settings hold for nothing but the end.
    free = [continued(model, prompt, 12, None) for prompt in PROMPTS]
    end = free[0][5]
    model.generation_config = GenerationConfig(do_sample=True, repetition_penalty=9.0, eos_token_id=[end])
    done = []
    found = continue_greedily(model, tokenizer, PROMPTS, 32, 12, done.append)
    assert found == [continued(model, prompt, 12, end) for prompt in PROMPTS]
    assert found[0][-1] == end
    assert len(found[0]) <= 6
    assert sum(done) == len(PROMPTS)


def test_no_more_than_the_positions(gpt2):
    model, tokenizer = gpt2
    positions = model.config.max_position_embeddings
    model.generation_config.eos_token_id = model.config.eos_token_id = -5
    (made,) = continue_greedily(model, tokenizer, [(5, 6, 7)], 32, 1000)
    assert len(made) == positions - 3
    (usual,) = continue_greedily(model, tokenizer, [(5, 6, 7)], 32)
    assert len(usual) == min(NEW_TOKENS, positions - 3)


def test_prompts_are_spread_over_the_texts():
    texts = [tuple(range(10 * n, 10 * n + length)) for n, length in enumerate((1, 2, 3, 9, 500, 70, 64))]
    chosen = choose_prompts(texts, 3)
    assert chosen == [(10,), (30, 31, 32, 33), tuple(range(50, 50 + PROMPT))]
    assert [len(ids) for ids in choose_prompts(texts, 99)] == [1, 1, 4, 32, 32, 32]
    with pytest.raises(DataError, match="no text has two tokens"):
        choose_prompts([(1,), ()], 3)


def test_other_windows_are_not_compared(models):
    short = tiny_family("short", "llama", seed=1, max_position_embeddings=8)
    said = []
    both = {"full": models["full"], "short": short}
    made = evaluate(both, Dataset("lm", TEXT), OPTIONS, say=said.append).results[1]
    assert "kl_divergence" not in made.scores
    assert any("short: no comparison of next tokens with full: it reads" in line for line in said)
    made = evaluate(both, Dataset("lm", TEXT, context=8), OPTIONS).results[1]
    assert made.scores["kl_divergence"] > 0


def test_refused(models):
    with pytest.raises(UsageError, match="`continuations` does not go with `memory`"):
        results(models, continuations=2, memory=1 << 30)


# Divergences from a first model against one position at a time (tests/reference/divergence.py).

WINDOWS = [
    *(Window(0, tuple(range(5, 17)), 11), Window(0, tuple(range(20, 29)), 3)),
    *(Window(1, (7, 8), 1), Window(2, tuple(range(30, 42)), 11)),
]
HEADS = {
    "phi": {},
    "gpt2": {},
    "gemma2": {},
    "opt": {"word_embed_proj_dim": 8, "do_layer_norm_before": False},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
    "qwen3_moe": {},
    "mamba": {},
    "bloom": {},
}
"""A head with a bias; tied, with a cap, behind a projection; with scales; experts; a model without attention; one whose
body has another name."""


def batches() -> list[Batch]:
    return window_examples(WINDOWS, 1).batches(24)


def expected(first: Any, other: Any) -> tuple[list[float], list[int]]:
    """The divergence summed over each window, and how often both agree."""
    windows = [reference.compared((first, other), window.ids, window.counted) for window in WINDOWS]
    sums = [sum(value for value, _ in places) for places in windows]
    return sums, [sum(same for _, same in places) for places in windows]


def measured(first: Any, *others: Any) -> list[pd.DataFrame]:
    done = []

    @contextmanager
    def progress(_what, total=None, _unit="steps"):
        yield done.append
        assert sum(done) == total
        done.clear()

    with closing(Reference(batches())) as kept:
        return [kept.measure(InMemory(model), "reading", progress) for model in (first, *others)]


def made(model_type: str, seed: int) -> Any:
    config = tiny.tiny_config(model_type, "causal")
    config.update(HEADS[model_type])
    return tiny.drawn(tiny.auto_class(model_type, "causal"), config, seed)


def assert_right(model_type: str) -> Any:
    """Compare a model with itself and with another; return the first of both."""
    first, twin, another = (made(model_type, seed) for seed in (0, 0, 1))
    sums, agreed = expected(first, another)
    itself, same, other = measured(first, twin, another)
    for one in (itself, same):
        assert (one["divergence"] == 0).all(), "a model does not diverge from itself"
        assert (one["agreed"] == one["tokens"]).all()
    assert np.array_equal(same["nats"], itself["nats"])
    other = other.sort_values("example")
    assert other["tokens"].tolist() == [window.counted for window in WINDOWS]
    assert other["divergence"].to_numpy() == pytest.approx(np.array(sums), rel=1e-4, abs=1e-5)
    assert max(sums) > 1e-3
    assert other["agreed"].tolist() == agreed
    return first


@pytest.mark.parametrize("model_type", HEADS)
def test_every_kind_of_head(model_type, monkeypatch):
    """The output layer alone is kept of the first model, or the table if the embeddings are tied."""
    monkeypatch.setattr(logits, "BLOCK_VALUES", 5 * tiny.VOCAB)
    monkeypatch.setattr(language_model, "ROWS", 2)
    first = assert_right(model_type)
    kept = {value for value in first.parameters() if value.numel()}
    assert kept == {*first.get_output_embeddings().parameters()}


def test_a_head_that_takes_something_else(monkeypatch):
    """The model is kept whole, and run again."""
    monkeypatch.setattr(logits, "_parts", lambda _model: {})
    assert all(value.numel() for value in assert_right("gpt2").parameters())


@pytest.mark.parametrize(("logit", "said"), [(-torch.inf, "inf"), (torch.nan, "nan")])
def test_a_token_that_only_the_first_allows(logit, said):
    """Its divergence is infinite, or no number: no mean can be made of it."""
    first, other = (made("gpt2", seed) for seed in (0, 1))
    forward = other.forward

    def without_token_9(**inputs):
        output = forward(**inputs)
        output.logits[..., 9] = logit
        return output

    other.forward = without_token_9
    with pytest.raises(DataError, match=f"example 1: the loss is {said}, not a finite number"):
        measured(first, other)


def test_another_vocabulary_is_refused():
    first, other = (made("phi", seed) for seed in (0, 1))
    other.resize_token_embeddings(tiny.VOCAB - 1)
    with pytest.raises(UsageError, match=f"{tiny.VOCAB - 1} entries is compared with one of {tiny.VOCAB}"):
        measured(first, other)
