"""Sections 2.1 and 2.2 of 2309.01826: FFNs as arrays of hidden units, and what their sharing makes of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

FUSED = "gate_up_proj"
"""A layer whose output is that of two, one behind the other."""


@dataclass(frozen=True)
class Ffn:
    """FFN(x) = sum over units of act(x . w + b) v, plus a bias; gated: act(x . w + b) (x . w' + b').

    Attributes:
        inputs: `[1 or 2, units, width]`, w of each unit, and w' in a gated FFN.
        biases: `[1 or 2, units]`.
        outputs: `[units, width]`, v of each unit.
        bias: `[width]`.
    """

    inputs: np.ndarray
    biases: np.ndarray
    outputs: np.ndarray
    bias: np.ndarray

    def __len__(self) -> int:
        return len(self.outputs)

    def __call__(self, x: np.ndarray, act: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        first, *gates = (x @ own.T + bias for own, bias in zip(self.inputs, self.biases, strict=True))
        return act(first) * np.prod(gates, axis=0) @ self.outputs + self.bias

    @property
    def worth(self) -> np.ndarray:
        """||row of W1|| x ||row of V|| x ||column of W2|| of each unit."""
        return np.prod(np.linalg.norm([*self.inputs, self.outputs], axis=2), axis=0)


def read(tensors: Mapping[str, np.ndarray], axes: Mapping[str, int | None]) -> Ffn:
    """The FFN of these tensors; `axes` says where the hidden units lie, the output layer's last."""
    wide = {name: np.asarray(value, dtype=np.float64) for name, value in tensors.items()}
    output = list(axes)[-1].rpartition(".")[0]
    names = [name for name in axes if name.endswith("weight")]
    matrices = {name.rpartition(".")[0]: np.moveaxis(wide[name], int(axes[name] or 0), 0) for name in names}
    outputs = matrices.pop(output)
    if FUSED in matrices:
        matrices = dict(zip(("gate", "up"), np.split(matrices[FUSED], 2), strict=True))
    none = np.zeros(len(outputs))
    biases = np.stack([wide.get(f"{layer}.bias", none) for layer in matrices])
    bias = wide.get(f"{output}.bias", np.zeros(outputs.shape[1]))
    return Ffn(np.stack([*matrices.values()]), biases, outputs, bias)


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
            made[name] = np.moveaxis(ffn.outputs, 0, axis)
        elif layer == FUSED:
            made[name] = np.concatenate(ffn.inputs)
        elif kind == "weight":
            made[name] = np.moveaxis(ffn.inputs[inputs.index(layer)], 0, axis)
        else:
            made[name] = ffn.biases[inputs.index(layer)]
    return made


def mean(ffns: Sequence[Ffn]) -> Ffn:
    """The mean of the weights, unit by unit."""
    return Ffn(*(sum(alike) / len(ffns) for alike in zip(*(vars(ffn).values() for ffn in ffns), strict=True)))


def concat(ffns: Sequence[Ffn]) -> Ffn:
    """All units side by side: the sum of the FFNs."""
    inputs, biases = (
        np.concatenate([getattr(ffn, name) for ffn in ffns], axis=1) for name in ("inputs", "biases")
    )
    return Ffn(inputs, biases, np.concatenate([ffn.outputs for ffn in ffns]), sum(ffn.bias for ffn in ffns))


def scaled(ffn: Ffn, factor: float) -> Ffn:
    """`factor` times its output."""
    return replace(ffn, outputs=ffn.outputs * factor, bias=ffn.bias * factor)


def narrowed(ffn: Ffn, width: int) -> Ffn:
    """The units of the largest products of norms, in their order."""
    best = np.sort(np.argsort(-ffn.worth, kind="stable")[:width])
    return Ffn(ffn.inputs[:, best], ffn.biases[:, best], ffn.outputs[best], ffn.bias)


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
