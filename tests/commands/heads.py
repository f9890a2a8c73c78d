"""Calls of `prunecli prune-heads`, and a heads.json of random scores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
from typer.testing import CliRunner

from prunecli.checkpoint.attention import attention_layers
from prunecli.checkpoint.layout import check_tensors
from prunecli.checkpoint.reader import Checkpoint, open_checkpoint
from prunecli.commands.app import describe
from prunecli.commands.prune_heads import prune_heads
from prunecli.methods.heads.statistics import FORMAT, HeadScores, scores_payload


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


def run(*arguments: object) -> Result:
    """One call of the command; failures are described as the command line does."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(prune_heads)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is None or isinstance(result.exception, SystemExit):
        return Result(result.exit_code, result.stdout, result.stderr)
    text, status = describe(result.exception)
    return Result(status, result.stdout, result.stderr + text)


def scored(checkpoint: Checkpoint, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """heads.json of random scores."""
    draw = np.random.default_rng(seed)
    layers = attention_layers(checkpoint)
    made = HeadScores(
        **{
            "method": "gradient",
            "fingerprint": checkpoint.fingerprint,
            "model_type": checkpoint.model_type,
            "task": "translation",
            "examples": 8,
            "heads": {layer.name: layer.heads for layer in layers},
            "values": {layer.name: draw.random(layer.num_heads) for layer in layers},
            **changes,
        }
    )
    return {"format": FORMAT, **scores_payload(made)}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def kept(directory: Path) -> dict[str, tuple[int, ...]]:
    with open_checkpoint(directory) as checkpoint:
        check_tensors(checkpoint)
        return {layer.name: layer.heads for layer in attention_layers(checkpoint)}


def count(directory: Path) -> int:
    return sum(map(len, kept(directory).values()))
