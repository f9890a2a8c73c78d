"""Heads whose width follows from their number: no key moves them alone, so a small model is watched as it runs.

The linear layers of an attention that run are those that make queries, keys and values, and last the one that mixes
the heads. As everywhere, what is found is believed once a cut model does what the masked one does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prunecli.model.axes import Carrier
from prunecli.model.probe import LayerKey, UnitKeys, head_counts, is_key_value, with_scaled

if TYPE_CHECKING:
    from prunecli.model.trial import Trial

_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)

Options = dict[str, tuple[Carrier, ...]]


def traced_heads(trial: Trial, layers: Sequence[LayerKey]) -> list[UnitKeys]:
    """The heads of a small model, by the key that counts them; `carriers` by the names in files.

    Args:
        layers: of the model.
    """
    found = []
    counts = {
        key: count for key, count in head_counts(trial.skeleton.effective).items() if not is_key_value(key)
    }
    for key in counts:
        units = with_scaled(UnitKeys({key: 1}, counts[key], {}), trial.skeleton)
        if not units.scaled or units.held < 2:
            continue
        carriers: Options = {}
        for module in (
            f"{one}.{number}" for stack in layers for one in stack.modules for number in range(stack.depth)
        ):
            # Where both stacks have a key of their own, its name says which.
            others = [
                other for other in counts if other != key and any(s in other and s in module for s in _SIDES)
            ]
            if not others:
                for own in _attentions(trial.model.get_submodule(module), module):
                    carriers |= _carriers(trial, own, units.held)
        files = {name: file for file, name in trial.modules.items()}
        if carriers and files.keys() >= carriers.keys():  # else the files hold several of them in one
            found.append(replace(units, carriers={files[name]: own for name, own in carriers.items()}))
    return found


_SIDES = ("encoder", "decoder")


def _attentions(module: Any, name: str) -> Iterator[str]:
    """Names of the outermost attentions within a module."""
    for piece, child in module.named_children():
        own = f"{name}.{piece}"
        if _ATTENTION.search(piece) or _ATTENTION.search(type(child).__name__):
            yield own
        else:
            yield from _attentions(child, own)


def _carriers(trial: Trial, attention: str, heads: int) -> Options:
    """Where the heads of one attention lie; empty where that cannot be."""
    linears = [name for name in trial.linears if name.startswith(f"{attention}.")]
    if len(linears) < 2:
        return {}
    found: Options = {}
    shapes = trial.skeleton.shapes
    *inputs, output = linears
    is_turned = type(trial.model.get_submodule(output)).__name__ == "Conv1D"  # its weight is [in, out]
    width = shapes[f"{output}.weight"][0 if is_turned else 1]
    found[f"{output}.weight"] = (Carrier(0 if is_turned else 1),)
    for name in inputs:
        dim = 1 if is_turned else 0
        blocks, rest = divmod(shapes[f"{name}.weight"][dim], width)
        if rest or blocks not in (1, 2, 3) or width % heads:
            return {}
        for tensor, axis in ((f"{name}.weight", dim), (f"{name}.bias", 0)):
            if tensor in shapes:
                found[tensor] = (Carrier(axis), Carrier(axis, (1,) * blocks))[: min(blocks, 2)]
    # A tensor as long as there are heads may be a norm over the width of one where both are the same.
    for name, shape in shapes.items() if width != heads * heads else ():
        if name.startswith(f"{attention}.") and name.rpartition(".")[0] not in linears and heads in shape:
            found[name] = (Carrier(shape.index(heads)),)
    return found
