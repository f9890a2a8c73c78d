"""Which tensors a model has, and which make up its sparse layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.structure import Structure
from tests.structures import axes_of
from tests.tiny import random_tensors, tiny_nllb_moe, write_weights


@pytest.fixture
def tiny(tmp_path):
    return tiny_nllb_moe(tmp_path / "model")


def with_tensors(directory: Path, change: Any) -> Checkpoint:
    """The checkpoint after `change` has altered its mapping of tensors in place."""
    tensors = random_tensors(open_model(directory).config)
    change(tensors)
    write_weights(directory, tensors)
    return open_model(directory)


class TestSparseLayers:
    @pytest.mark.parametrize("ids", [[1, 1], [1, 8]], ids=str)
    def test_a_structure_of_another_model(self, tiny: Path, ids: list[int]) -> None:
        checkpoint = open_model(tiny)
        checkpoint.structure = Structure(axes_of("expert", {"model.encoder.layers.1.ffn": ids}, 8))
        with pytest.raises(CheckpointError, match=r"config\.json names"):
            checkpoint.require_mixtures()


class TestCheckTensors:
    def test_every_fault_is_named(self, tiny: Path) -> None:
        def change(tensors: dict[str, np.ndarray]) -> None:
            del tensors["model.encoder.layer_norm.bias"]
            tensors["model.stray.weight"] = np.zeros(3, np.float32)
            tensors["model.decoder.layer_norm.bias"] = np.zeros(3, np.float32)

        with pytest.raises(CheckpointError) as caught:
            with_tensors(tiny, change).check()
        assert "1 missing (model.encoder.layer_norm.bias)" in caught.value.message
        assert "1 unexpected (model.stray.weight)" in caught.value.message
        assert "1 misshapen (model.decoder.layer_norm.bias [3] instead of [16])" in caught.value.message
