"""What each tensor is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from prunecli.errors import CheckpointError, UsageError
from prunecli.methods.vocabulary.rewrite import resized, trimmed_tensors, vocabulary_size
from prunecli.model.checkpoint import open_model
from prunecli.tensors.stream import Copy, Rows, Slices, check_expressions
from tests.families import tiny_family
from tests.tiny import VOCAB, write_json

KEPT = (0, 2, 3, 4, 30)


def test_rows_of_tables_and_columns_of_biases(tmp_path: Path) -> None:
    with open_model(tiny_family(tmp_path / "in", "bart")) as opened:
        outputs = {output.name: output for output in trimmed_tensors(opened, KEPT)}
        assert list(outputs) == list(opened.tensors)
        check_expressions(opened, list(outputs.values()))
        assert outputs["model.shared.weight"].expression == Rows("model.shared.weight", KEPT)
        assert outputs["model.shared.weight"].shape == (5, 32)
        bias = outputs["final_logits_bias"]
        assert bias.expression == Slices("final_logits_bias", 1, ((0, 1), (2, 5), (30, 31)))
        assert bias.shape == (1, 5)
        others = [
            output for name, output in outputs.items() if name not in ("model.shared.weight", bias.name)
        ]
        assert all(output.expression == Copy(output.name) for output in others)


@pytest.mark.parametrize("kept", [(), (1, 0), (0, 0), (-1, 0), (0, VOCAB)])
def test_ids_that_are_not_ascending_ids_are_refused(kept: tuple[int, ...], tmp_path: Path) -> None:
    with open_model(tiny_family(tmp_path / "in", "gpt2")) as opened, pytest.raises(UsageError) as caught:
        trimmed_tensors(opened, kept)
    assert f"ids of a vocabulary of {VOCAB}" in str(caught.value)


@pytest.mark.parametrize("size", ["many", 0, True, 7.0])
def test_a_size_that_is_no_count_is_refused(size: object, tmp_path: Path) -> None:
    path = tiny_family(tmp_path / "in", "gpt2")
    write_json(path / "config.json", {"model_type": "gpt2", "vocab_size": size})
    with open_model(path) as opened, pytest.raises(CheckpointError, match="vocab_size"):
        vocabulary_size(opened)


def test_every_key_of_the_size_is_set(tmp_path: Path) -> None:
    with open_model(tiny_family(tmp_path / "in", "marian", decoder_vocab_size=VOCAB)) as opened:
        config = {**opened.config, "other_vocab_size": 7}
        made = resized(opened, config, 5)
    assert {key: made[key] for key in made if key.endswith("vocab_size")} == {
        "vocab_size": 5,
        "decoder_vocab_size": 5,
        "other_vocab_size": 7,
    }
