"""Sections 2.1 and 2.2 of 2309.01826, slowly: FFNs as lists of hidden units, and what sharing and dropping saves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

FUSED = "gate_up_proj"
"""A layer whose output is that of two, one behind the other."""


@dataclass(frozen=True)
class Unit:
    """One hidden unit: its input vectors (two in a gated FFN) with their biases, and its output vector."""

    inputs: tuple[np.ndarray, ...]
    biases: tuple[float, ...]
    output: np.ndarray

    @property
    def worth(self) -> float:
        """||row of W1|| x ||row of V|| x ||column of W2||."""
        return float(np.prod([np.linalg.norm(vector) for vector in (*self.inputs, self.output)]))


@dataclass(frozen=True)
class Ffn:
    """FFN(x) = sum over units of act(x . w + b) v, plus a bias; gated: act(x . w + b) (x . w' + b')."""

    units: tuple[Unit, ...]
    bias: np.ndarray

    def __call__(self, x: np.ndarray, act: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        total = np.zeros_like(x) + self.bias
        for unit in self.units:
            first, *gates = (x @ vector + bias for vector, bias in zip(unit.inputs, unit.biases, strict=True))
            value = act(first)
            for gate in gates:
                value = value * gate
            total += value[..., None] * unit.output
        return total


def read(tensors: Mapping[str, np.ndarray], axes: Mapping[str, int | None]) -> Ffn:
    """The FFN of these tensors; `axes` says where the hidden units lie, the output layer's last."""
    wide = {name: np.asarray(value, dtype=np.float64) for name, value in tensors.items()}
    output = list(axes)[-1].rpartition(".")[0]
    names = [name for name in axes if name.endswith("weight")]
    matrices = {name.rpartition(".")[0]: np.moveaxis(wide[name], int(axes[name] or 0), 0) for name in names}
    if FUSED in matrices:
        matrices = dict(zip(("gate", "up"), np.split(matrices[FUSED], 2), strict=True)) | matrices
        del matrices[FUSED]
    inputs = [layer for layer in matrices if layer != output]
    units = []
    for number, row in enumerate(matrices[output]):
        biases = (wide[f"{layer}.bias"][number] if f"{layer}.bias" in wide else 0.0 for layer in inputs)
        vectors = tuple(matrices[layer][number] for layer in inputs)
        units.append(Unit(vectors, tuple(map(float, biases)), row))
    return Ffn(tuple(units), wide.get(f"{output}.bias", np.zeros(matrices[output].shape[1])))


def write(ffn: Ffn, axes: Mapping[str, int | None]) -> dict[str, np.ndarray]:
    """The tensors of an FFN, the inverse of `read`."""
    output = list(axes)[-1].rpartition(".")[0]
    inputs = [
        name[: -len(".weight")]
        for name in axes
        if name.endswith("weight") and not name.startswith(f"{output}.")
    ]
    made = {}
    for name, axis in axes.items():
        layer, _, kind = name.rpartition(".")
        if axis is None:
            made[name] = ffn.bias
        elif layer == output:
            made[name] = np.stack([unit.output for unit in ffn.units], axis=axis)
        elif layer == FUSED:
            made[name] = np.concatenate(
                [np.stack([unit.inputs[part] for unit in ffn.units]) for part in (0, 1)]
            )
        elif kind == "weight":
            made[name] = np.stack([unit.inputs[inputs.index(layer)] for unit in ffn.units], axis=axis)
        else:
            made[name] = np.array([unit.biases[inputs.index(layer)] for unit in ffn.units])
    return made


def mean(ffns: Sequence[Ffn]) -> Ffn:
    """The mean of the weights, unit by unit."""
    units = []
    for alike in zip(*(ffn.units for ffn in ffns), strict=True):
        inputs = tuple(
            sum(vectors) / len(ffns) for vectors in zip(*(unit.inputs for unit in alike), strict=True)
        )
        biases = tuple(
            sum(values) / len(ffns) for values in zip(*(unit.biases for unit in alike), strict=True)
        )
        units.append(Unit(inputs, biases, sum(unit.output for unit in alike) / len(ffns)))
    return Ffn(tuple(units), sum(ffn.bias for ffn in ffns) / len(ffns))


def concat(ffns: Sequence[Ffn]) -> Ffn:
    """All units side by side: the sum of the FFNs."""
    return Ffn(tuple(unit for ffn in ffns for unit in ffn.units), sum(ffn.bias for ffn in ffns))


def scaled(ffn: Ffn, factor: float) -> Ffn:
    """`factor` times its output."""
    units = tuple(Unit(unit.inputs, unit.biases, unit.output * factor) for unit in ffn.units)
    return Ffn(units, ffn.bias * factor)


def narrowed(ffn: Ffn, width: int) -> Ffn:
    """The units of the largest products of norms, in their order."""
    best = sorted(range(len(ffn.units)), key=lambda number: -ffn.units[number].worth)[:width]
    return Ffn(tuple(ffn.units[number] for number in sorted(best)), ffn.bias)


def takase_kiyono(layers: int, groups: int, order: str) -> list[int]:
    """Group of each layer by the algorithm of 2104.06022, counted from 1 as there."""
    found = []
    for i in range(1, layers + 1):
        if order == "sequence":
            new = (i - 1) % (layers // groups) == 0
            found.append(max(found, default=0) + 1 if new else found[-1])
        elif i <= groups or order == "cycle" or i <= groups * (layers // groups - 1):
            found.append((i - 1) % groups + 1)
        else:
            found.append(groups - (i - 1) % groups)
    return found
