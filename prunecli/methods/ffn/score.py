"""How much each hidden unit of an FFN matters by its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from prunecli.methods.ffn.hidden_units import is_output, tensor_expression
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.ffn import FfnLayer
from prunecli.tensors.computing import values

if TYPE_CHECKING:
    from prunecli.methods.sharing.arrange import Group


def unit_norms(
    checkpoint: Checkpoint, layers: Mapping[str, FfnLayer], group: Group, *, output_only: bool = False
) -> np.ndarray:
    """The product over the FFN's matrices of the l2 norm of a unit's part: ||row of W1|| x ||column of W2||.

    Of the FFN that the group's initialisation makes; read block by block.

    Args:
        output_only: ||column of W2|| alone, what an activation of 1 adds to the output.

    Returns:
        `[init_width]`, float64.

    Raises:
        CheckpointError: a file ends early.
    """
    product = np.ones(group.init_width)
    member = layers[group.members[0]]
    matrices = [
        (suffix, axis, block)
        for suffix, axis in member.tensors.items()
        if axis is not None and suffix.endswith("weight")
        if not output_only or is_output(member.tensors, suffix)
        for block in range(member.blocks[suffix])
    ]
    for suffix, axis, block in matrices:
        squares, row = np.zeros(group.init_width), 0
        expression = tensor_expression(checkpoint, layers, group, suffix, block=block)
        for rows in values(checkpoint, expression, "F64"):
            if axis == 0:
                squares[row : row + len(rows)] = np.square(rows).sum(axis=1)
                row += len(rows)
            else:
                squares += np.square(rows).sum(axis=0)
        product *= np.sqrt(squares)
    return product
