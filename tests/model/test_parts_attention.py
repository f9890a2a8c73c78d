"""The attentions of a checkpoint, as found from its record, config and structure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import open_model
from prunecli.model.structure import KEY, Structure
from tests.structures import axes_of
from tests.tiny import change_config, tiny_nllb_moe


def with_structure(directory: Path, structure: Structure, **changes: Any) -> Path:
    change_config(directory, **{KEY: structure.to_json(), **changes})
    return directory


@pytest.mark.parametrize("heads", [(2,), (0, 0)])
def test_heads_that_cannot_be(tmp_path, heads):
    name = "model.encoder.layers.0.self_attn"
    structure = Structure(axes_of("head", {name: heads}, 2))
    with (
        open_model(with_structure(tiny_nllb_moe(tmp_path / "tiny"), structure)) as checkpoint,
        pytest.raises(
            CheckpointError, match=r"names heads .* of model.encoder.layers.0.self_attn, which had 2"
        ),
    ):
        checkpoint.layout.attentions
