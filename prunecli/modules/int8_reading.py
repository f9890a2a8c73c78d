"""Weights of a checkpoint that go to int8 while they are read: one matrix at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from prunecli.model.checkpoint import Checkpoint
from prunecli.modules.filling import Destination, tensors_of
from prunecli.modules.int8 import Int8Matrix, experts_to_int8, linear_to_int8, quantise, takes_int8
from prunecli.modules.sparse_ffn import EXPERT_PARTS


def read_int8_experts(model: Any, checkpoint: Checkpoint) -> None:
    """Every expert of the sparse FFNs, which become `Int8SparseFFN`s; biases in float32."""
    for mixture in checkpoint.mixtures:
        module = model.get_submodule(mixture.name)
        matrices: dict[str, list[Int8Matrix]] = {}
        for part, suffix in EXPERT_PARTS.items():
            names = [mixture.expert_tensor(expert, suffix) for expert in range(mixture.num_experts)]
            tensors = tensors_of(checkpoint, names, torch.float32)
            if part.endswith("weight"):
                matrices[part] = [quantise(tensor) for tensor in tensors]
            else:
                biases = torch.stack([*tensors])
                setattr(module, part, nn.Parameter(biases, requires_grad=False))
        experts_to_int8(module, *matrices.values())


def fill_int8(targets: Sequence[Destination], checkpoint: Checkpoint) -> list[Destination]:
    """The weights of linear layers, which become `Int8Linear`s; returns the other targets."""
    taken: list[Destination] = []
    left: list[Destination] = []
    for target in targets:
        (taken if target.attribute == "weight" and takes_int8(target.module) else left).append(target)
    weights = tensors_of(checkpoint, (target.name for target in taken), torch.float32)
    for target, weight in zip(taken, weights, strict=True):
        linear_to_int8(target.module, weight)
    return left
