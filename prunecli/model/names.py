"""From the names in the files to those of the family's stock layout: prefixes, buffers, tied aliases."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from prunecli.architectures import Architecture
from prunecli.tensors.reader import Stored

SAMPLES = 256
"""Blocks that are compared of two long tensors."""

BLOCK = 4096
"""Bytes in a block."""


def stored_names(
    family: Architecture, tied: Mapping[str, str], names: Sequence[str], equal: Callable[[str, str], bool]
) -> dict[str, str]:
    """Name in the files -> name in the stock layout, in file order.

    A checkpoint of the base model lacks the first part of the names (`encoder.layers…` for
    `model.encoder.layers…`): it is added. Old endings and beginnings get their new name, buffers are
    left out. Of the names of a
    tensor in `tied`, the stock one is kept, or the first; an alias whose values differ (by `equal`) is kept under
    its own name.
    """
    renamed = {
        name: _with_prefix(family, _with_new_beginning(family, _with_new_ending(family, name)))
        for name in names
        if not any(name == ending or name.endswith(f".{ending}") for ending in family.buffers)
    }
    owner: dict[str, str] = {new: old for old, new in renamed.items() if new not in tied}
    found: dict[str, str] = {}
    for old, new in renamed.items():
        target = tied.get(new)
        if target is None:
            found[old] = new
        elif target not in owner:
            owner[target] = old
            found[old] = target
        elif not equal(old, owner[target]):
            found[old] = new
    return found


def same_values(one: tuple[int, Stored], other: tuple[int, Stored]) -> bool:
    """Whether two tensors, each (file descriptor, place), hold the same values.

    Tensors of up to 1 MiB are compared whole, longer ones in 256 blocks of 4 KiB spread evenly: those
    that were trained apart differ in nearly every value.
    """
    (first, a), (second, b) = one, other
    if (a.info.dtype, a.info.shape) != (b.info.dtype, b.info.shape):
        return False
    if a.offset == b.offset and os.path.sameopenfile(first, second):
        return True
    nbytes = a.info.nbytes
    if nbytes <= SAMPLES * BLOCK:
        return os.pread(first, nbytes, a.offset) == os.pread(second, nbytes, b.offset)
    starts = (round(index * (nbytes - BLOCK) / (SAMPLES - 1)) for index in range(SAMPLES))
    return all(
        os.pread(first, BLOCK, a.offset + at) == os.pread(second, BLOCK, b.offset + at) for at in starts
    )


def _with_new_ending(family: Architecture, name: str) -> str:
    for old, new in family.renamed.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _with_new_beginning(family: Architecture, name: str) -> str:
    for old, new in family.prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _with_prefix(family: Architecture, name: str) -> str:
    prefix = family.stacks[0].layers.split(".", 1)[0] + "."
    known = (
        *(stack.layers.split("{", 1)[0] for stack in family.stacks),
        *(spec.name for spec in family.tensors),
        *family.tied,
        *family.extras,
        *((f"{family.embedding.input}.",) if family.embedding else ()),
    )
    return prefix + name if f"{prefix}{name}".startswith(known) and not name.startswith(known) else name
