"""Models without a head learn their teacher's hidden states or vectors: the measures, runs, what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from prunecli.commands.finetune import finetune
from prunecli.commands.prune import prune_heads, trim_vocabulary
from prunecli.processes import ProcessGroup
from prunecli.running import encoding
from prunecli.text.tokens import load_tokenizer
from prunecli.training.data import Validation
from prunecli.training.loss import HiddenDistance, make_lesson
from prunecli.training.options import LossOptions
from prunecli.training.state import Start
from tests.commands.calls import call, done, refused
from tests.contracts.method_contract import digests
from tests.evaluation.test_tasks import cosine_table, vectors_of
from tests.families import tiny_family
from tests.opening import load
from tests.reference.training_loss import squared_distance
from tests.sentence_model import sentence_model
from tests.training.runs import text_file

TEXTS = ["the hen", "in the nest", "a tin hat on the hen", "no"]
SMALL = "--batch-tokens 60 --eval-every 10 --warmup 1 --learning-rate 0.001 --device cpu"
RUN = f"--task feature-extraction --text text.txt --teacher model {SMALL}"
VECTORS = f"{RUN} --task embedding"


def expected_distance(student: str) -> tuple[float, int]:
    """Text by text, without padding: the last hidden states as transformers gives them by their own name."""
    tokenizer = load_tokenizer(Path(student))
    models = [load(path) for path in (student, "model")]
    total, count = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            own, other = (model(input_ids=ids).last_hidden_state[0].tolist() for model in models)
        total += sum(squared_distance(*pair) for pair in zip(own, other, strict=True))
        count += len(own)
    return total, count


@pytest.fixture
def folder():
    sentence_model("model")
    text_file("text.txt")
    Path("valid.txt").write_text("\n".join(TEXTS) + "\n")


def test_a_pruned_sentence_encoder_recovers(folder):
    done(prune_heads, "model --metric random --ratio 0.5 -o pruned")
    before, count = expected_distance("pruned")
    figures = done(finetune, "pruned", RUN, "--valid-text valid.txt --steps 40 -o out --json").json
    assert figures["stock"]["is_stock"] is False
    assert figures["stock"]["reason"].startswith("heads were removed")
    assert figures["arguments"]["task"] == "feature-extraction"
    assert (figures["arguments"]["hidden"], figures["arguments"]["distill"]) == (1.0, 0.0)
    after, _ = expected_distance("out")
    assert after < before / 2
    assert figures["best"]["loss"] == pytest.approx(after / count, rel=1e-3)
    for module in ("1_Pooling", "2_Dense"):
        assert digests(f"out/{module}") == digests(f"model/{module}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--distill 0.5", "--distill goes with models that have a head"),
        ("--label-smoothing 0", "--label-smoothing goes with models that have a head"),
        ("--task embedding --distill 0.5", "a head, not with --task embedding"),
        ("--task embedding --teacher plain", "the teacher's vectors are 32 wide, the model's 8"),
        ("--teacher narrow", "the teacher's hidden states are 16 wide, the model's 32"),
        ("--teacher other", "the teacher has a vocabulary of 99"),
    ],
)
def test_what_does_not_fit_is_refused(folder, options, message):
    sentence_model("plain", is_dense=False)
    tiny_family("narrow", "bert", architectures=["BertModel"], hidden_size=16)
    tiny_family("other", "bert", architectures=["BertModel"], vocab_size=99)
    refused(call(finetune, "model", RUN, options, "--steps 1 -o out"), message)
    assert not Path("out").exists()


def test_without_a_word_modules_decide_what_a_model_without_a_head_learns(folder):
    said = []
    assert Start(Path("model")).task(said.append) == "embedding"
    assert said.pop() == "modules.json says how texts are pooled: `task=embedding`, their vectors."
    Path("model", "modules.json").unlink()
    assert Start(Path("model")).task(said.append) == "feature-extraction"
    assert "`task=embedding` is for vectors" in said.pop()


def mean_cosine() -> float:
    table = cosine_table(*(vectors_of(Path(name), TEXTS) for name in ("other", "model")))
    return float(np.diag(table).mean())


def test_vectors_and_hidden_states(folder, monkeypatch):
    sentence_model("model", is_dense=False)
    sentence_model("other", is_dense=False, seed=1)
    models = [load(name) for name in ("other", "model")]
    tokenizer = load_tokenizer(Path("other"))
    learned = make_lesson(Path("other"), models[0], tokenizer, Path("model"), models[1])
    examples = learned.examples(tokenizer, models[0], TEXTS)
    batch = examples.batch(range(len(TEXTS))).with_labels
    distance = len(TEXTS) * (1 - mean_cosine())
    found = HiddenDistance(LossOptions(), models[1], learned)(models[0], batch)
    assert found.item() == pytest.approx(distance, rel=1e-4)
    total, count = expected_distance("other")
    both = HiddenDistance(LossOptions(hidden=3.0), models[1], learned)(models[0], batch)
    assert both.item() == pytest.approx(distance + 3 * len(TEXTS) * total / count, rel=1e-4)
    validation = Validation(examples, 12, HiddenDistance(LossOptions(), models[1], learned))
    assert validation.measure(models[0], ProcessGroup())["cosine"] == pytest.approx(mean_cosine(), abs=1e-5)
    monkeypatch.setattr(encoding, "MIXING", ("bert",))  # of which no text may be padded
    assert replace(learned, tokenizer=tokenizer).examples(tokenizer, models[0], TEXTS).equal


def test_a_reduced_model_recovers_and_another_vocabulary_is_no_hindrance(folder):
    sentence_model("model", is_dense=False)
    done(trim_vocabulary, "model", "--text valid.txt --min-count 2", "-o trimmed")
    done(prune_heads, "trimmed --metric random --ratio 0.5 -o pruned")
    run = f"{VECTORS} --valid-text valid.txt --eval-every 20 --steps 60 --json"
    result = done(finetune, "pruned", run, "-o out")
    assert "model has another vocabulary: it reads each text in its own tokens" in result.err
    figures = result.json
    assert figures["best"]["loss"] < figures["training"][0]["loss"] / 2
    last = figures["validation"][-1]
    assert last["cosine"] == pytest.approx(1 - last["loss"], abs=1e-5)
    assert Path("out/1_Pooling/config.json").read_bytes() == Path("model/1_Pooling/config.json").read_bytes()
    again = call(finetune, "pruned", VECTORS, "--hidden-weight 1 --steps 1 -o more")
    refused(again, "the teacher has a vocabulary of")
