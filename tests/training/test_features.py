"""Models without a head learn their teacher's hidden states: the measure, a run, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from prunecli.commands.finetune import finetune
from prunecli.commands.prune_heads import prune_heads
from prunecli.errors import DataError, UsageError
from prunecli.modules.loading import load_model
from prunecli.processes import ProcessGroup
from prunecli.running.encoding import text_examples
from prunecli.text.tokens import load_tokenizer
from prunecli.training.loss import FeatureDistance, headless_loss
from prunecli.training.options import LossOptions
from prunecli.training.start import Start
from prunecli.training.watch import Validation
from tests.commands.calls import call, raising, refused
from tests.families import tiny_family
from tests.reference.training_loss import squared_distance
from tests.sentence_model import sentence_model
from tests.training.runs import text_file

TEXTS = ["the hen", "in the nest", "a tin hat on the hen", "no"]
SMALL = ("--batch-tokens", 60, "--eval-every", 10, "--warmup", 1, "--learning-rate", 1e-3, "--device", "cpu")
TASK = ("--task", "feature-extraction")
RUN = (*TASK, "--text", "text.txt", "--teacher", "model", *SMALL)


def expected_distance(student: Path, teacher: Path) -> tuple[float, int]:
    """Text by text, without padding: the last hidden states as transformers gives them by their own name."""
    tokenizer = load_tokenizer(student)
    models = [load_model(path, device="cpu", dtype="float32").eval() for path in (student, teacher)]
    total, count = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            own, other = (model(input_ids=ids).last_hidden_state[0].tolist() for model in models)
        total += sum(squared_distance(*pair) for pair in zip(own, other, strict=True))
        count += len(own)
    return total, count


@pytest.mark.parametrize(
    ("family", "name"), [("bert", "BertModel"), ("gpt2", "GPT2Model"), ("llama", "LlamaModel")]
)
def test_the_distance_is_that_of_every_real_token(tmp_path: Path, family: str, name: str) -> None:
    student = tiny_family(tmp_path / "one", family, architectures=[name])
    teacher = tiny_family(tmp_path / "two", family, architectures=[name], seed=1)
    total, count = expected_distance(student, teacher)
    assert total > 0
    models = [load_model(path, device="cpu", dtype="float32").eval() for path in (student, teacher)]
    examples = text_examples(load_tokenizer(student), models[0], TEXTS)
    objective = FeatureDistance(LossOptions(hidden=2.0), models[1])
    with torch.no_grad():
        found = objective(models[0], examples.batch(range(len(TEXTS))).with_labels)
    assert float(found) == pytest.approx(2 * total, rel=1e-4)
    validation = Validation(examples, 12, FeatureDistance(LossOptions(hidden=1.0), models[1]))
    assert validation.measure(models[0], ProcessGroup())["loss"] == pytest.approx(total / count, rel=1e-4)


def test_what_is_left_of_the_loss_without_logits() -> None:
    assert headless_loss(LossOptions(0.1, 0.5, 2.0), "feature-extraction") == LossOptions(0.0, 0.0, 1.0, 1.0)
    assert headless_loss(LossOptions(hidden=3.0), "feature-extraction").hidden == 3.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    sentence_model(Path("model"))
    text_file(Path("text.txt"))
    Path("valid.txt").write_text("\n".join(TEXTS) + "\n")
    return tmp_path


def test_a_pruned_sentence_encoder_recovers(folder: Path) -> None:
    assert call(prune_heads, "model", "--metric", "random", "--ratio", 0.5, "-o", "pruned").status == 0
    before, count = expected_distance(Path("pruned"), Path("model"))
    result = call(finetune, "pruned", *RUN, "--valid-text", "valid.txt", "--steps", 40, "-o", "out", "--json")
    assert result.status == 0, result.err
    figures = json.loads(result.out)
    assert figures["stock"]["is_stock"] is False
    assert figures["stock"]["reason"].startswith("heads are gone")
    assert figures["arguments"]["task"] == "feature-extraction"
    assert (figures["arguments"]["hidden"], figures["arguments"]["distill"]) == (1.0, 0.0)
    after, _ = expected_distance(Path("out"), Path("model"))
    assert after < before / 2
    assert figures["best"]["loss"] == pytest.approx(after / count, rel=1e-3)
    for module in ("1_Pooling", "2_Dense"):
        for file in (folder / "model" / module).iterdir():
            assert (folder / "out" / module / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--distill", 0.5), "--distill goes with models that have a head"),
        (("--temperature", 1), "--temperature goes with models that have a head"),
        (
            ("--label-smoothing", 0, "--distill", 0),
            "--label-smoothing and --distill go with models that have a head",
        ),
    ],
)
def test_options_of_a_loss_of_logits_are_refused(
    folder: Path, options: tuple[object, ...], message: str
) -> None:
    refused(call(finetune, "model", *RUN, *options, "--steps", 1, "-o", "out"), message, 2)


def test_it_needs_a_teacher_and_text(folder: Path) -> None:
    with pytest.raises(UsageError, match="a model without a head learns a teacher's hidden states"):
        raising(finetune, "model", *TASK, "--text", "text.txt", *SMALL, "-o", "out")
    refused(
        call(finetune, "model", *TASK, "--teacher", "model", *SMALL, "-o", "out"),
        "feature-extraction needs text",
        2,
    )
    Path("empty.tsv").write_text("0\tthe hen\n")
    refused(
        call(finetune, "model", *TASK, "--labelled", "empty.tsv", *SMALL, "-o", "out"),
        "--labelled goes with --task classification, not feature-extraction",
        2,
    )
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "the teacher's hidden states are 16 wide, the model's 32"),
        ({"vocab_size": 99}, "the teacher has a vocabulary of 99"),
    ],
)
def test_a_teacher_of_another_shape_is_refused(folder: Path, changes: dict[str, int], message: str) -> None:
    tiny_family("other", "bert", architectures=["BertModel"], **changes)
    result = call(finetune, "model", *RUN, "--teacher", "other", "-o", "out")
    refused(result, message, 2)
    assert not Path("out").exists()


def test_text_without_tokens_is_refused(tmp_path: Path) -> None:
    path = tiny_family(tmp_path / "model", "gpt2", architectures=["GPT2Model"])
    with pytest.raises(DataError, match="no text has a token"):
        text_examples(load_tokenizer(path), load_model(path, device="cpu"), ["", ""])


def test_without_a_word_modules_decide_what_a_model_without_a_head_learns(folder: Path) -> None:
    said: list[str] = []
    assert Start(Path("model")).task(said.append) == "embedding"
    assert said.pop() == "modules.json says how texts are pooled: --task embedding, their vectors."
    Path("model", "modules.json").unlink()
    assert Start(Path("model")).task(said.append) == "feature-extraction"
    assert "--task embedding is for vectors" in said.pop()


def test_an_embedding_model_without_a_teacher_is_told_what_it_needs(folder: Path) -> None:
    result = call(finetune, "model", "--text", "text.txt", *SMALL, "-o", "out")
    refused(result, "--task embedding: a model without a head learns a teacher's vectors", 2)
    assert "Name the model that it comes from with --teacher DIR." in result.err
