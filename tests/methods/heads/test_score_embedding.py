"""Heads of an embedding model: the slope of its vectors by each mask, and the cosine without each head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from prunecli.methods.heads.score import ScoreOptions, score_heads
from prunecli.model.axes import module_of
from prunecli.model.checkpoint import open_model
from prunecli.modules.attention import output_projections
from prunecli.modules.loading import load_model
from prunecli.text.choice import TextChoice
from prunecli.text.tokens import load_tokenizer
from tests.reference import head_importance as reference
from tests.sentence_model import sentence_model

TEXTS = ("the hen", "a tin hat on the hen", "no", "the hat is in the inn")


class Subject:
    """A tiny sentence encoder in float64, its vectors made text by text."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = sentence_model(path / "model"), path / "text.txt"
        self.file.write_text("\n".join(TEXTS) + "\n")
        self.layers = open_model(self.path).layout.own_attentions
        self.model = load_model(self.path, device="cpu", dtype="float32").double()
        self.projections = output_projections(self.model, self.layers)
        self.dense = load_file(self.path / "2_Dense" / "model.safetensors")["linear.weight"]
        self.ids = [load_tokenizer(self.path)(text)["input_ids"] for text in TEXTS]

    def unit(self, number: int) -> np.ndarray:
        with torch.no_grad():
            hidden = self.model(input_ids=torch.tensor([self.ids[number]])).last_hidden_state[0]
        vector = np.tanh(self.dense.astype(np.float64) @ hidden.numpy().mean(0))
        return np.asarray(vector / np.linalg.norm(vector))

    def scores(self, **options: object) -> dict[str, np.ndarray]:
        found = score_heads(
            self.path,
            TextChoice(files=(self.file,)),
            ScoreOptions(device="cpu", dtype="float32", batch_tokens=20, **options),  # type: ignore[arg-type]
        )
        assert (found.task, found.examples) == ("embedding", len(TEXTS))  # by itself, without a head
        return {module_of(name): np.array(own) for name, own in found.values.items()}


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("embedding"))


@pytest.mark.parametrize("memory", [None, 2 << 30])
def test_the_slope_along_a_random_direction(subject: Subject, memory: int | None) -> None:
    drawn = [np.random.default_rng(number).standard_normal(8, np.float32) for number in range(len(TEXTS))]
    losses: list[Callable[[], float]] = [
        lambda number=number: float(drawn[number] @ subject.unit(number)) for number in range(len(TEXTS))
    ]
    found = subject.scores(memory=memory)
    for name, projection in subject.projections.items():
        want = reference.importance(losses, projection.weight, len(found[name]), 1, 1e-4)
        np.testing.assert_allclose(found[name], want, rtol=1e-3, atol=1e-5)


def test_the_cosine_without_each_head(subject: Subject) -> None:
    whole = [subject.unit(number) for number in range(len(TEXTS))]
    found = subject.scores(metric="ablation")
    for layer in subject.layers:
        for head in range(layer.num_heads):
            weight = subject.projections[layer.name].weight
            with reference.scaled_head(weight, layer.num_heads, head, 1, 0.0):
                want = np.mean([whole[number] @ subject.unit(number) for number in range(len(TEXTS))])
            assert found[layer.name][head] == pytest.approx(want, abs=1e-5)
