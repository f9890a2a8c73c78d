"""What `share-ffn` does, as a table and as JSON: the FFNs that are stored, those that go, those that stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from prunecli.commands import console

if TYPE_CHECKING:
    from prunecli.commands.rewriting import Shown
    from prunecli.methods.ffn.arrange import FfnPlan, Group
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.model.ffn import FfnLayer
    from prunecli.results.sharing import FfnSharing

COLUMNS = ("layers", "FFN", "width", "parameters")
INITS = {"mean": "mean of {}", "first": "the first", "last": "the last", "concat": "{} side by side"}


def ffn_document(shown: Shown, plan: FfnPlan, seed: int | None) -> FfnSharing:
    """What `--json` prints."""
    from prunecli.results.sharing import FfnGroup, FfnSharing

    parameters = _parameters(shown, plan)
    groups = [
        FfnGroup(
            owner=group.owner,
            members=[*group.members],
            sources=[*group.sources],
            init=group.init or "keep",
            width=group.width,
            scale=group.scale,
            parameters=parameters[group.owner],
        )
        for group in plan.groups
    ]
    return shown.document(FfnSharing, seed, groups=groups, removed=plan.removed, sparse=plan.sparse)


def show_ffns(shown: Shown, plan: FfnPlan) -> None:
    """The table and the sizes, on stdout."""
    console.show(ffn_table(shown.result.source, plan, _parameters(shown, plan)))
    shown.show_sizes_and_place()


def _parameters(shown: Shown, plan: FfnPlan) -> dict[str, int]:
    """Owner of a group -> parameters of its FFN."""
    tensors = {layer.name: layer.tensors for layer in shown.result.source.layout.ffns}
    sizes = {output.name: output.info.numel for output in shown.result.rewrite.outputs}
    return {
        group.owner: sum(sizes[f"{group.owner}.{suffix}"] for suffix in tensors[group.owner])
        for group in plan.groups
    }


def ffn_table(checkpoint: Checkpoint, plan: FfnPlan, parameters: Mapping[str, int]) -> console.Shown:
    """Layers, what their FFN is made of, its hidden units, its parameters.

    Args:
        checkpoint: the source.
        plan: the decision.
        parameters: of each group's FFN, by its owner.
    """
    layers = {layer.name: layer for layer in checkpoint.layout.ffns}
    rows = [
        [
            _layers(layers[name] for name in group.members),
            _made(group),
            f"{group.width:,}",
            f"{parameters[group.owner]:,}",
        ]
        for group in plan.groups
        if group.is_merged or len(group.members) > 1
    ]
    alone = [group for group in plan.groups if not group.is_merged and len(group.members) == 1]
    for (_, width), run in groupby(alone, key=lambda group: (layers[group.owner].side, group.width)):
        own = list(run)
        total = sum(parameters[group.owner] for group in own)
        what = "as before" if len(own) == 1 else "as before, one each"
        rows.append([_layers(layers[group.owner] for group in own), what, f"{width:,}", f"{total:,}"])
    if plan.sparse:
        rows.append([_layers(layers[name] for name in plan.sparse), "experts, as before", "", ""])
    if plan.removed:
        rows.append([_layers(layers[name] for name in plan.removed), "none", "0", "0"])
    return console.table("Feed-forward networks", COLUMNS, rows, text_columns=2)


def _made(group: Group) -> str:
    if group.init is None:
        return "shared, as before"
    if len(group.members) == 1:
        made = "its own"
    elif len(group.sources) == 1 and group.init in ("mean", "concat"):
        made = "the one shared before"
    else:
        made = INITS[group.init].format(len(group.sources))
    if group.width < group.init_width:
        made += f", best {group.width:,} of {group.init_width:,}"
    if group.width > group.init_width:
        made += f", {group.width - group.init_width:,} new"
    return made if group.scale == 1 else f"{made}, x {group.scale:.3g}"


def _layers(layers: Iterable[FfnLayer]) -> str:
    """`encoder 0-5, decoder 0, 3`."""
    from prunecli.model.ffn import ranges

    return ", ".join(
        f"{side} {ranges([layer.layer for layer in run])}"
        for side, run in groupby(layers, key=lambda layer: layer.side)
    )
