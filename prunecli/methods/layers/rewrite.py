"""What each tensor of the checkpoint with fewer layers is made of: pure, nothing is read but names.

Every tensor is a copy, under the number that its layer has from now on. What belongs to more than one layer outlives
the one that holds it: a table of positions of a stack's first layer, and an attention or FFN that other layers run too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prunecli.errors import UsageError
from prunecli.methods.layers.plan import LayerPlan
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.depth import Rename, heirs, keeping_layers, renaming
from prunecli.model.quantisation import numbered_refusal, renamed_settings
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.stream import Copy, Output


def rewrite_layers(checkpoint: Checkpoint, plan: LayerPlan) -> Rewrite:
    """The checkpoint with only the layers that the plan keeps, its tensors in the order of the source.

    Raises:
        UsageError: no such layer, or none that stays.
    """
    layout, kept = checkpoint.layout, plan.kept
    for stack in layout.family.stacks:
        depth = layout.sizes.depth(stack)
        numbers = list(kept.get(stack.side, range(depth)))
        if not numbers or numbers != [number for number in range(depth) if number in numbers]:
            raise UsageError(
                f"The {stack.side} cannot keep layers {numbers}: it has {depth}.",
                "Numbers ascend from 0, each once; one layer stays at least.",
            )
    rename, moved = renaming(layout.family, kept), _moved(checkpoint, plan)
    target = None if plan.dtype is None else parse_dtype(plan.dtype)
    outputs = [
        Output(new, info.cast(target).dtype, info.shape, Copy(name))
        for name, info in checkpoint.tensors.items()
        if (new := rename(moved.get(name, name))) is not None
    ]
    structure = keeping_layers(layout.sizes, checkpoint.structure, kept)
    rewrite = rewritten(checkpoint, structure, tuple(outputs), plan.step, plan.decision)
    return replace(rewrite, config=_renumbered(checkpoint, rewrite.config, rename))


def _renumbered(checkpoint: Checkpoint, config: Mapping[str, Any], rename: Rename) -> dict[str, Any]:
    """config.json, the layers that its settings of a quantisation name under their new numbers.

    Raises:
        UnsupportedModelError: a pattern that holds the number of a layer.
    """
    columns = {stack.layers.partition(".{layer}")[0] for stack in checkpoint.layout.family.stacks}
    numbered = re.compile(
        "|".join(rf"{re.escape(column.rpartition('.')[2])}\\?\.[\[(\\]*\d" for column in columns)
    )

    def renamed(text: str) -> str | None:
        if not numbered.search(text):
            return text
        for column in columns:
            before = f"{column.partition('.')[0]}." if "." in column else ""
            given = text if text.startswith(f"{column}.") else f"{before}{text}"
            if given.startswith(f"{column}."):
                new = rename(given)
                return new if new is None or given == text else new.removeprefix(before)
        raise numbered_refusal(checkpoint.path, "layers", text)

    return renamed_settings(config, renamed)


def _moved(checkpoint: Checkpoint, plan: LayerPlan) -> dict[str, str]:
    """Tensor whose layer goes, and which others need -> its name in the first of these, by the old numbers."""
    layout = checkpoint.layout
    rename = renaming(layout.family, plan.kept)
    moved: dict[str, str] = {}
    for stack in layout.family.stacks:
        first = stack.layers.format(layer=plan.kept.get(stack.side, (0,))[0])
        moved |= {
            f"{stack.layers.format(layer=0)}.{spec.name}": f"{first}.{spec.name}"
            for attention in stack.attentions
            for spec in attention.tensors
            if spec.first
        }
    attentions = {layer.name: layer for layer in layout.attentions}
    for owner, heir in heirs(layout.attentions, rename).items():
        moved |= dict(zip(attentions[owner].tensor_names, attentions[heir].tensor_names, strict=True))
    ffns = {layer.name: layer for layer in layout.ffns}
    for owner, heir in heirs(layout.ffns, rename).items():
        moved |= {f"{owner}.{suffix}": f"{heir}.{suffix}" for suffix in ffns[owner].tensors}
    return moved
