"""Calls of `prunecli prune-heads`, and a heads.json of random scores."""

from pathlib import Path
from typing import Any

import numpy as np

from prunecli.commands.prune import prune_heads
from prunecli.model.checkpoint import Checkpoint, open_model
from tests.commands.calls import both
from tests.scores import scores_of_all

run, done = both(prune_heads)


def scored(checkpoint: Checkpoint, seed: int = 0, **changes: Any) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    fields = {"task": "translation", "examples": 8, **changes}
    return scores_of_all(checkpoint, "head", draw, **fields).to_json()


def kept(directory: Path) -> dict[str, tuple[int, ...]]:
    checkpoint = open_model(directory)
    checkpoint.check()
    return {layer.name: layer.heads for layer in checkpoint.layout.attentions}


def count(directory: Path) -> int:
    return sum(map(len, kept(directory).values()))
