"""What each tensor of a checkpoint is counted under, by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from prunecli.architectures import Architecture
from prunecli.architectures.records import Part, TensorSpec
from prunecli.model.ffn import within

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint


def parts(checkpoint: Checkpoint) -> dict[str, Part | Literal["other"]]:
    """What each tensor is counted under; "other" for those that its family does not declare."""
    if checkpoint.architecture is None:
        return dict.fromkeys(checkpoint.tensors, "other")
    patterns = _part_patterns(checkpoint.architecture)
    return {name: _part(patterns, name) for name in checkpoint.tensors}


def part_of(checkpoint: Checkpoint, name: str) -> Part | Literal["other"]:
    """What one tensor is counted under; see `parts`."""
    return _part(_part_patterns(checkpoint.architecture), name) if checkpoint.architecture else "other"


Patterns = list[tuple["re.Pattern[str]", Part]]


def _part_patterns(family: Architecture) -> Patterns:
    """Full-name patterns of every declared tensor."""
    any_number = {"layer": r"\d+", "expert": r"\d+"}
    found: Patterns = [
        (name_pattern(spec.name, any_number, whole=True), spec.part) for spec in family.tensors
    ]
    # An alias that is kept because its values differ counts as what it should equal.
    found += [
        (name_pattern(alias, any_number, whole=True), spec.part)
        for alias, name in family.tied.items()
        for spec in family.tensors
        if spec.name == name
    ]
    if (embedding := family.embedding) is not None:
        owned = {f"{embedding.input}.": True, f"{embedding.output}.project.weight": False}
        found += [(name_pattern(name, {}, whole=not begins), "embeddings") for name, begins in owned.items()]
    for stack in family.stacks:
        ffn = stack.ffn
        groups: list[tuple[str, tuple[TensorSpec, ...], Part | None]] = [
            (stack.layers, tuple(spec for attention in stack.attentions for spec in attention.tensors), None),
            (stack.layers, stack.norms, None),
            (within(stack.layers, ffn), (*ffn.router, *ffn.tensors), None),
        ]
        if ffn.expert is not None:
            groups.append((f"{stack.layers}.{ffn.name}.{ffn.expert}", ffn.tensors, "experts"))
        for owner, specs, part in groups:
            found += [
                (name_pattern(f"{owner}.{spec.name}", any_number, whole=True), part or spec.part)
                for spec in specs
            ]
    return found


def _part(patterns: Patterns, name: str) -> Part | Literal["other"]:
    return next((part for pattern, part in patterns if pattern.match(name)), "other")


def name_pattern(template: str, numbers: Mapping[str, str], *, whole: bool = False) -> re.Pattern[str]:
    """A regular expression for `template`, its "{layer}" and "{expert}" replaced by those of `numbers`."""
    pieces = re.split(r"\{(\w+)\}", template)
    text = "".join(numbers[piece] if index % 2 else re.escape(piece) for index, piece in enumerate(pieces))
    return re.compile(text + (r"\Z" if whole else ""))
