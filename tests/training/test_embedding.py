"""`finetune --task embedding`: a reduced sentence encoder learns the vectors of the model that it came from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prunecli.commands.finetune import finetune
from prunecli.commands.prune_heads import prune_heads
from prunecli.commands.trim_vocabulary import trim_vocabulary
from prunecli.modules.loading import load_model
from prunecli.processes import ProcessGroup
from prunecli.text.tokens import load_tokenizer
from prunecli.training.options import LossOptions
from prunecli.training.teacher import VectorDistance, make_lesson
from prunecli.training.watch import Validation
from tests.commands.calls import call, refused
from tests.evaluation.test_embedding import cosine_table, plain, vectors_of
from tests.reference.training_loss import squared_distance
from tests.sentence_model import sentence_model
from tests.training.runs import text_file

TEXTS = ["the hen", "in the nest", "a tin hat on the hen", "no"]
SMALL = ("--batch-tokens", 60, "--eval-every", 20, "--warmup", 1, "--learning-rate", 1e-3, "--device", "cpu")
RUN = ("--task", "embedding", "--text", "text.txt", "--teacher", "model", *SMALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    plain(sentence_model(Path("model")))
    text_file(Path("text.txt"))
    Path("valid.txt").write_text("\n".join(TEXTS) + "\n")
    return tmp_path


def mean_cosine(student: str) -> float:
    return float(
        np.diag(cosine_table(vectors_of(Path(student), TEXTS), vectors_of(Path("model"), TEXTS))).mean()
    )


def test_vectors_and_hidden_states(folder: Path) -> None:
    plain(sentence_model(Path("other"), seed=1))
    models = [load_model(name, device="cpu", dtype="float32").eval() for name in ("other", "model")]
    tokenizer = load_tokenizer(Path("other"))
    learned = make_lesson(Path("other"), models[0], tokenizer, Path("model"), models[1])
    examples = learned.examples(tokenizer, models[0], TEXTS)
    batch = examples.batch(range(len(TEXTS))).with_labels
    distance = len(TEXTS) * (1 - mean_cosine("other"))
    found = VectorDistance(LossOptions(), learned)(models[0], batch)
    assert found.item() == pytest.approx(distance, rel=1e-4)
    total, count = 0.0, 0
    for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        ids = row[mask.bool()][None]
        own, other = (model(input_ids=ids).last_hidden_state[0].tolist() for model in models)
        total, count = total + sum(map(squared_distance, own, other)), count + len(own)
    both = VectorDistance(LossOptions(hidden=3.0), learned)(models[0], batch)
    assert both.item() == pytest.approx(distance + 3 * len(TEXTS) * total / count, rel=1e-4)
    validation = Validation(examples, 12, VectorDistance(LossOptions(), learned))
    assert validation.measure(models[0], ProcessGroup())["cosine"] == pytest.approx(
        mean_cosine("other"), abs=1e-5
    )


def test_a_reduced_model_recovers_and_another_vocabulary_is_no_hindrance(folder: Path) -> None:
    few = ("--text", "valid.txt", "--min-count", 2)
    assert call(trim_vocabulary, "model", *few, "-o", "trimmed").status == 0
    assert call(prune_heads, "trimmed", "--metric", "random", "--ratio", 0.5, "-o", "pruned").status == 0
    run = (*RUN, "--valid-text", "valid.txt", "--steps", 60, "--json")
    result = call(finetune, "pruned", *run, "-o", "out")
    assert result.status == 0, result.err
    assert "model has another vocabulary: it reads each text in its own tokens" in result.err
    figures = json.loads(result.out)
    assert figures["best"]["loss"] < figures["training"][0]["loss"] / 2
    assert figures["validation"][-1]["cosine"] == pytest.approx(
        1 - figures["validation"][-1]["loss"], abs=1e-5
    )
    assert Path("out/1_Pooling/config.json").read_bytes() == Path("model/1_Pooling/config.json").read_bytes()
    refused(
        call(finetune, "pruned", *RUN, "--hidden-weight", 1, "--steps", 1, "-o", "more"),
        "the teacher has a vocabulary of",
        2,
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--distill", 0.5), "--distill goes with models that have a head, not with --task embedding"),
        (("--teacher", "dense"), "the teacher's vectors are 8 wide, the model's 32"),
        (("--from-scratch", "model"), "--task embedding does not go with --from-scratch"),
    ],
)
def test_what_cannot_be_learned_is_refused(folder: Path, more: tuple[object, ...], message: str) -> None:
    sentence_model(Path("dense"))
    start = () if "--from-scratch" in more else ("model",)
    refused(call(finetune, *start, *RUN, *more, "--steps", 1, "-o", "out"), message, 2)
    assert not Path("out").exists()
