"""What tensors' names say: those of the stock layout that they stand for, and what an undeclared family is like."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prunecli.architectures import Architecture
from prunecli.model.quantised import method_of
from prunecli.tensors.reader import Handle, Stored, TensorInfo, read_into

SAMPLES = 256
"""Blocks that are compared of two long tensors."""

BLOCK = 4096
"""Bytes in a block."""

_TABLES = ("embed_tokens", "word_embeddings", "wte", "embed_in", "tok_embeddings", "shared")


@dataclass(frozen=True)
class Surmise:
    """Guess about a model from the names of its tensors.

    Attributes:
        modules: name of a group of tensors, layers and experts as `*` -> its tensors.
        tables: of these groups, those that look like the embeddings of tokens.
        layers: column of layers -> how many: {"model.layers": 16}.
        experts: mixture of experts, layers as `*` -> how many in each, the most where layers differ.
        quantisation: method that config.json names ("awq"), or "".
        text_type: model type of the language model that this one wraps, or "".
    """

    modules: Mapping[str, tuple[str, ...]]
    tables: tuple[str, ...] = ()
    layers: Mapping[str, int] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    quantisation: str = ""
    text_type: str = ""


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
    prefix, known = _beginnings(family)
    buffers, endings = tuple(f".{ending}" for ending in family.buffers), tuple(family.renamed)
    older = (*family.prefixes,)

    def new(name: str) -> str:
        if name.startswith(known) and not name.startswith(older) and not name.endswith(endings):
            return name  # as nearly all are
        for old, ending in family.renamed.items():
            if name.endswith(old):
                name = name.removesuffix(old) + ending
                break
        for old, beginning in family.prefixes.items():
            if name.startswith(old):
                name = beginning + name.removeprefix(old)
                break
        return prefix + name if not name.startswith(known) and f"{prefix}{name}".startswith(known) else name

    renamed = {name: new(name) for name in names if not (name.endswith(buffers) or name in family.buffers)}
    owner: dict[str, str] = {name: old for old, name in renamed.items() if name not in tied}
    chosen: dict[str, str] = {}
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
    return all(_bytes(first, a.offset + at, size) == _bytes(second, b.offset + at, size) for at in starts)


def _bytes(file: Handle, offset: int, nbytes: int) -> bytes:
    if isinstance(file, int):
        return os.pread(file, nbytes, offset)
    data = bytearray(nbytes)
    read_into(file, offset, memoryview(data))
    return bytes(data)


def surmise(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Surmise:
    """All that can be said of a checkpoint of an undeclared family."""
    modules: dict[str, list[str]] = defaultdict(list)
    layers: dict[str, set[int]] = defaultdict(set)
    experts: dict[str, set[int]] = defaultdict(set)
    for name, info in tensors.items():
        pieces = name.split(".")
        numbers = [index for index, piece in enumerate(pieces) if piece.isdecimal()]
        last = len(pieces) - 1
        if numbers and numbers[0] > 0:
            layers[".".join(pieces[: numbers[0]])].add(int(pieces[numbers[0]]))
            last = min(numbers[0] + 2, last)
        modules[_starred(pieces[:last]) or name].append(name)
        for index, piece in enumerate(pieces[:-1]):
            if "expert" in piece and "shared" not in piece:
                if number := re.fullmatch(r"(?:expert_)?(\d+)", pieces[index + 1]):
                    experts[_starred(pieces[: index + 1])].add(int(number[1]))
                elif len(info.shape) == 3:  # stacked: [experts, ...]
                    experts[_starred(pieces[: index + 1])] |= set(range(min(info.shape[0], 1 << 16)))
    tables = [group for group, names in modules.items() if group.endswith(_TABLES) and len(names) == 1]
    return Surmise(
        {group: tuple(names) for group, names in modules.items()},
        tuple(tables),
        {column: len(seen) for column, seen in layers.items()},
        {group: len(seen) for group, seen in experts.items() if len(seen) > 1},
        method_of(config),
        text_type(config),
    )


def text_type(config: Mapping[str, Any]) -> str:
    """Model type of the language model that config.json describes under `text_config`; "" where it has none."""
    settings = config.get("text_config")
    return str(settings.get("model_type") or "") if isinstance(settings, Mapping) else ""


def _beginnings(family: Architecture) -> tuple[str, tuple[str, ...]]:
    """Return the prefix that names of the base model lack, and the prefixes of the stock layout's names."""
    if not family.stacks:
        return "", ()
    return family.stacks[0].layers.split(".", 1)[0] + ".", (
        *(stack.layers.split("{", 1)[0] for stack in family.stacks),
        *(spec.name for spec in family.tensors),
        *family.tied,
        *family.extras,
        *((f"{family.embedding.input}.",) if family.embedding else ()),
    )


def _starred(pieces: Iterable[str]) -> str:
    return ".".join("*" if piece.isdecimal() else piece for piece in pieces)
