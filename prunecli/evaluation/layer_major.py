"""Losses of a model whose layers stay on disk: all batches go through one layer after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from prunecli.progress import Progress, silent
from prunecli.running.examples import Batch
from prunecli.running.layerwise.budget import activation_bytes, backward_bytes, output_bytes, state_bytes
from prunecli.running.layerwise.runner import Layerwise
from prunecli.running.runner import BatchCost, Group, Pass

Runner = Callable[[Sequence[Batch], Sequence[Pass], Callable[[int, Any], None]], None]
"""Runs the passes of batches, and hands the number of each and what it returns on, in order."""


def in_memory(_batches: Sequence[Batch], passes: Sequence[Pass], finish: Callable[[int, Any], None]) -> None:
    """One pass after another, of a model that is held whole."""
    with torch.inference_mode():
        for number, forward in enumerate(passes):
            finish(number, forward())


def by_layer(session: Layerwise, what: str, progress: Progress = silent) -> Runner:
    """All passes together, of the skeleton of `session`, to the same bits.

    Args:
        what: what is done, for the progress.

    Returns:
        a runner that raises, beside what the passes do: UsageError for too little memory, OutputError where states
        find no room, CheckpointError for weights that cannot be read.
    """

    def hand_on(start: int, finish: Callable[[int, Any], None], number: int, result: Any) -> None:
        finish(start + number, result)

    def run(batches: Sequence[Batch], passes: Sequence[Pass], finish: Callable[[int, Any], None]) -> None:
        groups = list(session.groups(batches, partial(need_of, backward=False)))
        total = len(batches) * len(session.skeleton.stages)
        with progress(f"{what}, {how(groups)}", total, "batches x layers") as advance:
            for group in groups:
                end = group.start + len(group.batches)
                with session.running(group, advance) as layers:
                    layers.forward(passes[group.start : end], finish=partial(hand_on, group.start, finish))

    return run


def how(groups: Sequence[Group[Any]]) -> str:
    """How batches are run, for the progress."""
    return "layer by layer" if len(groups) < 2 else f"layer by layer, in {len(groups)} groups"


def need_of(session: Layerwise, batch: Batch, *, backward: bool) -> BatchCost:
    """What a batch takes: its widest layer or its logits, and what is kept of it between layers.

    Args:
        backward: whether it goes back too, for which the output of every layer is kept.
    """
    shape, config = session.shape, session.skeleton.model.config
    rows, keys = batch.inputs["input_ids"].shape
    lengths = {
        "encoder": keys,
        "decoder": batch.inputs.get("decoder_input_ids", batch.inputs["input_ids"]).shape[1],
    }
    of_layer = backward_bytes if backward else activation_bytes
    labels = batch.labels
    values, tokens = (
        (config.vocab_size, labels.numel()) if labels.dim() > 1 else (config.num_labels, rows * keys)
    )
    activations = output_bytes(shape, int(values), tokens, backward=backward)
    states = 0
    for side, length in lengths.items():
        stages = [stage for stage in session.skeleton.stages if stage.side == side]
        if not stages:
            continue
        activations = max(activations, of_layer(shape, rows, length, keys))
        output = rows * length * shape.d_model * shape.itemsize
        biases = shape.heads * length * (length + keys) * shape.itemsize if session.has_position_bias else 0
        sent = state_bytes(shape, rows * length, rows * length) - output
        kept = len(stages) * output + sum(stage.ffn is not None for stage in stages) * sent
        states += output + biases + (kept + 2 * sent if backward else sent)
    return BatchCost(activations, (states,))
