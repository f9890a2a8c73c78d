"""Gate statistics by hand, and routers that choose among some experts alone."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from prunecli.model.checkpoint import Checkpoint
from prunecli.results.gates import COUNTS, SUMS, TEXT_SUMS, GateModel, GateStatistics, GateSums, Mode


def gate_statistics(
    fingerprint: str,
    model_type: str,
    mode: Mode,
    layers: Sequence[str],
    num_experts: int,
    top_k: int,
    entries: Mapping[str, GateSums],
    lacks: Collection[str] = (),
    **more: Any,
) -> GateStatistics:
    """The statistics of a run."""
    return GateStatistics(
        format=GateStatistics.TEXT_FORMAT if mode == "text" else GateStatistics.FORMAT,
        model=GateModel(fingerprint=fingerprint, model_type=model_type),
        mode=mode,
        layers=tuple(layers),
        num_experts=num_experts,
        top_k=top_k,
        entries=dict(entries),
        lacks=frozenset(lacks),
        **more,
    )


def random_gates(checkpoint: Checkpoint, entries: Sequence[str]) -> GateStatistics:
    """Random statistics of the layers that a forward pass of the checkpoint runs; counts are 200 or more."""
    layers = [layer for layer in checkpoint.require_mixtures() if not layer.is_predicting]
    shape = len(layers), layers[0].original_experts
    mode = "forced" if checkpoint.model_type == "nllb-moe" else "text"

    def drawn(number: int) -> GateSums:
        draw = np.random.default_rng((0, number))
        made = {}
        for name in SUMS if mode == "forced" else TEXT_SUMS:
            own = shape[:1] if name == "tokens" else shape
            made[name] = draw.integers(200, 999, own) if name in COUNTS else draw.random(own)
        return GateSums(made)

    sums = {entry: drawn(number) for number, entry in enumerate(entries)}
    names = [layer.name for layer in layers]
    found = checkpoint.fingerprint, checkpoint.model_type
    return gate_statistics(*found, mode, names, shape[1], layers[0].top_k, sums)


def choose_among(module: Any, experts: Collection[int]) -> None:
    """Let the router of a sparse FFN choose as if it had no other experts."""
    router, numbers = module.router.classifier, torch.tensor([*experts])

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        logits = type(router).forward(router, tokens)
        own = numbers.to(logits.device)
        return torch.full_like(logits, -torch.inf).index_copy(1, own, logits[:, own])

    router.forward = forward


def changed(statistics: GateStatistics, **fields: Any) -> GateStatistics:
    """The statistics with other values of some fields; `fingerprint` is that of the model."""
    if "fingerprint" in fields:
        fields["model"] = statistics.model.model_copy(update={"fingerprint": fields.pop("fingerprint")})
    return statistics.model_copy(update=fields)
