"""`prunecli share-attention`: share or drop attentions, write a checkpoint with the result."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prunecli.commands import console
from prunecli.commands.groups import Without, flattened
from prunecli.commands.options import (
    CheckpointArgument,
    DtypeOption,
    OrderOption,
)
from prunecli.commands.rewriting import How
from prunecli.errors import UsageError
from prunecli.methods.sharing import Init, Treatment
from prunecli.tensors.quantities import whole_numbers

if TYPE_CHECKING:
    from prunecli.commands.rewriting import Shown
    from prunecli.methods.attention.arrange import AttentionPlan
    from prunecli.results.sharing import AttentionSharing

INITS = {"mean": "mean of {}", "first": "the first of {}", "last": "the last of {}"}


@flattened
def share_attention(
    checkpoint: CheckpointArgument = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What happens to self-attention, in the paper's words: SharedEnc, SharedDec, SharedEncSharedDec, "
            "NoEnc, NoDec, NoEncNoDec, SharedEncNoDec. Default, where none of the four is given: SharedEncSharedDec, "
            "or Shared of a model with one side.",
        ),
    ] = None,
    encoder: Annotated[
        Treatment | None,
        typer.Option(help="The encoder's self-attention, instead of --config."),
    ] = None,
    decoder: Annotated[
        Treatment | None,
        typer.Option(help="The decoder's self-attention, instead of --config."),
    ] = None,
    cross: Annotated[
        Treatment | None,
        typer.Option(help="Cross-attention. Default: keep."),
    ] = None,
    init: Annotated[
        Init | None,
        typer.Option(
            help="What a shared attention is made of: the mean of those that it stands for, the first, or the last. "
            "Default: mean.",
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="N[,M[,K]]",
            help="Shared attentions of each kind; or of the encoder and of the decoder; or of these and of "
            "cross-attention. Default: 1.",
        ),
    ] = None,
    order: OrderOption = None,
    dtype: DtypeOption = None,
    how: Annotated[How, Without({"explain"})] = How(Path("shared-attention")),
) -> None:
    """Share or drop self- and cross-attention; no model is built, no shard is held in memory.

    Each layer keeps its own norms and its own part of the cache. It costs more quality than sharing FFNs does; what
    comes back, comes back by training: prunecli finetune.
    """
    from prunecli.methods.attention.plan import AttentionOptions, plan_attention
    from prunecli.methods.attention.rewrite import rewrite_attention

    options = AttentionOptions(config, encoder, decoder, cross, _groups(groups), order, init, dtype)
    with how.open(checkpoint) as opened:
        plan = plan_attention(opened, options)
        how.note(*plan.reasons)
        shown = how.apply(opened, rewrite_attention(opened, plan))
        how.show(lambda: _document(shown, plan), lambda: _show(shown, plan))


def _document(shown: Shown, plan: AttentionPlan) -> AttentionSharing:
    from prunecli.results.sharing import AttentionGroup, AttentionSharing

    parameters = _parameters(shown, plan)
    groups = [
        AttentionGroup(
            owner=group.owner,
            members=[*group.members],
            sources=[*group.sources],
            init=group.init or "keep",
            heads=[*group.heads],
            parameters=parameters[group.owner],
        )
        for group in plan.groups
    ]
    return shown.document(AttentionSharing, None, groups=groups, removed=plan.removed)


def _show(shown: Shown, plan: AttentionPlan) -> None:
    """The table and the sizes, on stdout."""
    parameters = _parameters(shown, plan)
    rows = [
        [
            _layers(shown, group.members),
            _source(len(group.sources), group.init),
            str(len(group.heads)),
            f"{parameters[group.owner]:,}",
        ]
        for group in plan.groups
        if len(group.members) > 1 or group.init is not None
    ]
    alone = [group for group in plan.groups if len(group.members) == 1 and group.init is None]
    if alone:
        total = sum(parameters[group.owner] for group in alone)
        rows.append(
            [_layers(shown, [group.owner for group in alone]), "as before, one each", "", f"{total:,}"]
        )
    if plan.removed:
        rows.append([_layers(shown, plan.removed), "none", "0", "0"])
    columns = ("layers", "attention", "heads", "parameters")
    console.show(console.table("Attention", columns, rows, text_columns=2))
    shown.show_sizes_and_place()


def _source(sources: int, init: str | None) -> str:
    if init is None:
        return "shared, as before"
    return "its own" if sources == 1 and init == "mean" else INITS[init].format(sources)


def _parameters(shown: Shown, plan: AttentionPlan) -> dict[str, int]:
    """Owner of a group -> parameters of its attention."""
    tensors = {layer.name: layer.tensor_names for layer in shown.result.source.layout.attentions}
    sizes = {output.name: output.info.numel for output in shown.result.rewrite.outputs}
    return {group.owner: sum(sizes.get(name, 0) for name in tensors[group.owner]) for group in plan.groups}


def _layers(shown: Shown, names: Any) -> str:
    """`encoder 0-5, cross 0, 3`."""
    from prunecli.model.ffn import ranges

    layers = {layer.name: layer for layer in shown.result.source.layout.attentions}
    return ", ".join(
        f"{kind} {ranges([layer.layer for layer in run])}"
        for kind, run in groupby((layers[name] for name in names), key=lambda layer: layer.kind)
    )


def _groups(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    numbers = whole_numbers(text)
    if not 1 <= len(numbers) <= 3:
        raise UsageError(
            f"--groups {text}: not a number of groups.",
            "Give N; or N,M for encoder and decoder; or N,M,K for these and cross-attention.",
        )
    return numbers
