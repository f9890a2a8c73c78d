"""Sections 3.1 to 3.3 and A.1 to A.2 of 1911.12385, one token, one group and one value at a time, in plain Python."""

from collections.abc import Sequence
from math import erf, sqrt

Vector = list[float]
Matrix = Sequence[Sequence[float]]


def groups(kind: str, most: int, depth: int) -> list[int]:
    """g_l of every layer."""
    if kind == "linear":
        return [1] * depth
    if kind in ("group-linear", "group-linear-shuffle"):
        return [most] * depth
    return [max(most // 2 ** (layer - 1), 1) for layer in range(1, depth + 1)]


def gelu(value: float) -> float:
    """x times the probability that a standard normal variable is below x."""
    return value * 0.5 * (1 + erf(value / sqrt(2)))


def times(vector: Vector, matrix: Matrix) -> Vector:
    """x W for one row x."""
    return [
        sum(value * row[column] for value, row in zip(vector, matrix, strict=True))
        for column in range(len(matrix[0]))
    ]


def split(vector: Vector, parts: int) -> list[Vector]:
    """Equal parts, in order."""
    width = len(vector) // parts
    return [vector[part * width : (part + 1) * width] for part in range(parts)]


def group_transformation(vector: Vector, blocks: Sequence[Matrix], bias: Vector) -> Vector:
    """F_G (A.1): part i of the input times block i, the results one after another."""
    found = []
    for part, block in zip(split(vector, len(blocks)), blocks, strict=True):
        found += times(part, block)
    return [value + offset for value, offset in zip(found, bias, strict=True)]


def unit(
    kind: str,
    token: Vector,
    layers: Sequence[tuple[Sequence[Matrix], Vector]],
    reduce_weight: Matrix | None,
    reduce_bias: Vector | None,
) -> Vector:
    """e -> e_o; `layers` are (blocks, bias), `reduce_weight` has a row for each value of the output.

    A block stands in `blocks` once for each group that it serves. Without a reduction the last layer is linear.
    """
    values = list(token)
    for number, (blocks, bias) in enumerate(layers):
        if number and kind == "define":
            mixed = []
            for own, previous in zip(split(token, len(blocks)), split(values, len(blocks)), strict=True):
                mixed += own + previous
            values = mixed
        elif number and kind == "hgt-no-mixing":
            values = token + values
        elif number and kind == "group-linear-shuffle":
            parts = split(values, len(blocks))
            values = [part[position] for position in range(len(parts[0])) for part in parts]
        output = group_transformation(values, blocks, bias)
        if reduce_weight is not None or number < len(layers) - 1:
            output = [gelu(value) for value in output]
        if number and kind == "hgt-residual":
            output = [own + before for own, before in zip(output, values, strict=True)]
        values = output
    if reduce_weight is None or reduce_bias is None:
        return values
    return [
        sum(weight * value for weight, value in zip(row, values, strict=True)) + offset
        for row, offset in zip(reduce_weight, reduce_bias, strict=True)
    ]
