"""Gate statistics by hand, and routers that choose among some experts alone."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from prunecli.model.checkpoint import Checkpoint
from prunecli.results.gates import COUNTS, SUMS, TEXT_SUMS, GateModel, GateStatistics, GateSums


def gate_statistics(
    layers: Sequence[str], entries: Mapping[str, GateSums], fingerprint: str | None = "sha256:00", **more: Any
) -> GateStatistics:
    """The statistics of a run, whose routers pick two experts unless `more` says otherwise."""
    sums = next(iter(entries.values()))
    is_text = "routed" in sums
    fields = {"model_type": "qwen3_moe" if is_text else "nllb-moe", "top_k": 2, **more}
    return GateStatistics(
        format=GateStatistics.TEXT_FORMAT if is_text else GateStatistics.FORMAT,
        model=GateModel(fingerprint=fingerprint, model_type=fields.pop("model_type")),
        mode="text" if is_text else "forced",
        layers=tuple(layers),
        num_experts=sums.top1.shape[1],
        entries=dict(entries),
        **fields,
    )


def random_sums(seed: Any, layers: int, experts: int, names: Sequence[str] = SUMS) -> GateSums:
    """Counts are 200 or more."""
    draw, made = np.random.default_rng(seed), GateSums.zeros(layers, experts, names)
    for name, own in made.items():
        made[name] = draw.integers(200, 999, own.shape) if name in COUNTS else draw.random(own.shape)
    return made


def random_gates(checkpoint: Checkpoint, entries: Sequence[str]) -> GateStatistics:
    """Random statistics of the layers that a forward pass of the checkpoint runs."""
    layers = [layer for layer in checkpoint.require_mixtures() if not layer.is_predicting]
    experts, names = layers[0].original_experts, [layer.name for layer in layers]
    held = SUMS if checkpoint.model_type == "nllb-moe" else TEXT_SUMS
    sums = {
        entry: random_sums((0, number), len(layers), experts, held) for number, entry in enumerate(entries)
    }
    more = {"model_type": checkpoint.model_type, "top_k": layers[0].top_k}
    return gate_statistics(names, sums, checkpoint.fingerprint, **more)


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
