"""Names of tensors: those of the stock layout that they stand for, and groups of them by module."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from prunecli.architectures import Architecture
from prunecli.tensors.reader import Handle, Stored, bytes_of

SAMPLES = 256
"""Blocks that are compared of two long tensors."""

BLOCK = 4096
"""Bytes in a block."""

_RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def stored_names(
    family: Architecture, tied: Mapping[str, str], names: Sequence[str], equal: Callable[[str, str], bool]
) -> dict[str, str]:
    """Name in the files -> name in the stock layout, in file order.

    A checkpoint of the base model lacks the first part of the names (`encoder.layers…` for `model.encoder.layers…`): it
    is added. Buffers are left out. Of the names of a tensor in `tied`, the stock one is kept, or the first; an alias
    whose values differ (by `equal`) is kept under its own name.
    """
    prefix, known = _beginnings(family)
    buffers = tuple(f".{ending}" for ending in family.buffers)

    def new(name: str) -> str:
        return prefix + name if not name.startswith(known) and f"{prefix}{name}".startswith(known) else name

    renamed = {name: new(name) for name in names if not name.endswith(buffers)}
    owner = {name: old for old, name in renamed.items() if name not in tied}
    chosen = {}
    for old, name in renamed.items():
        target = tied.get(name)
        if target is None:
            chosen[old] = name
        elif target not in owner:
            owner[target] = old
            chosen[old] = target
        elif not equal(old, owner[target]):
            chosen[old] = name
    return chosen


def with_new_ending(name: str) -> str:
    """A name with the ending of today, where older checkpoints of BERT's kin have another."""
    return next((name.removesuffix(old) + new for old, new in _RENAMED.items() if name.endswith(old)), name)


def layer_of(name: str) -> str:
    """Return the part of a tensor's name up to the number of its layer; "" outside of layers."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match[0] if match else ""


def same_values(one: tuple[Handle, Stored], other: tuple[Handle, Stored]) -> bool:
    """Whether two tensors, each (file, place), hold the same values.

    Tensors of up to 1 MiB are compared whole, longer ones in 256 blocks of 4 KiB spread evenly: those
    that were trained apart differ in nearly every value.
    """
    (first, a), (second, b) = one, other
    if (a.info.dtype, a.info.shape) != (b.info.dtype, b.info.shape):
        return False
    size = BLOCK if a.info.nbytes > SAMPLES * BLOCK else a.info.nbytes
    starts = {round(index * (a.info.nbytes - size) / (SAMPLES - 1)) for index in range(SAMPLES)}
    return all(bytes_of(first, a.offset + at, size) == bytes_of(second, b.offset + at, size) for at in starts)


def _beginnings(family: Architecture) -> tuple[str, tuple[str, ...]]:
    """Return the prefix that names of the base model lack, and the prefixes of the stock layout's names."""
    if not family.stacks:
        return "", ()
    return family.stacks[0].layers.split(".", 1)[0] + ".", (
        *(stack.layers.split("{", 1)[0] for stack in family.stacks),
        *(spec.name for spec in family.tensors),
        *family.tied,
        *((f"{family.embedding.input}.",) if family.embedding else ()),
    )


def by_module(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Name of a group of tensors, the numbers of layers and experts as `*` -> its tensors."""
    groups = defaultdict(list)
    for name in names:
        pieces = name.split(".")
        numbers = [place for place, piece in enumerate(pieces) if piece.isdecimal()]
        end = min(numbers[0] + 2 if numbers and numbers[0] else len(pieces), len(pieces) - 1)
        starred = ("*" if piece.isdecimal() else piece for piece in pieces[:end])
        groups[".".join(starred) or name].append(name)
    return {group: tuple(own) for group, own in groups.items()}
