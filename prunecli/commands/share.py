"""`prunecli share-ffn`: share, drop, widen or narrow feed-forward networks, write a checkpoint with the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prunecli
from prunecli.commands import console
from prunecli.commands.checkpoints import with_demo_text
from prunecli.commands.command import command
from prunecli.commands.rewriting import RewritingOptions, ScoredOptions, Shown, dense_for_demo, output_option
from prunecli.methods.sharing.options import AttentionOptions, FfnOptions

if TYPE_CHECKING:
    from prunecli.methods.sharing.plan import Group, SharePlan
    from prunecli.results.rewriting import Sharing


class ShareFfn(RewritingOptions, ScoredOptions, FfnOptions):
    """Options of the command."""

    LEFT_OUT = frozenset({"stream", "save_scores"})

    output: Path = output_option("shared-ffn")


@command(ShareFfn)
def share_ffn(options: ShareFfn) -> None:
    """Share or drop feed-forward networks, at any width. Weights are streamed: no model is built.

    Each layer keeps its own norm. Recover the quality with prunecli finetune.
    """
    options.check_groups(2)
    options = dense_for_demo(with_demo_text(options, options.checkpoint))
    with options.open() as opened:
        plan = prunecli.plan_ffn_on_text(opened, options, options.text_run(options, measures=False))
        scored = options if plan.decision is not None and options.keep_units != "norms" else None
        if scored is None:
            options.refuse_text("no text is read here.")
        _share(opened, options, plan, scored, options)


def _share(opened: prunecli.Checkpoint, options: RewritingOptions, plan: SharePlan, *text: Any) -> None:
    """Carry out a plan, and show the result; `text` is as in `RewritingOptions.apply`."""
    console.note(*plan.reasons)
    shown = options.apply(opened, prunecli.rewrite_shared(opened, plan), *text)
    options.show(lambda: share_document(shown, plan), share_blocks(shown, plan))


INITS = {"mean": "mean of {}", "first": "the first", "last": "the last", "concat": "{} side by side"}


def share_document(shown: Shown, plan: SharePlan) -> Sharing:
    """The JSON that `--json` prints."""
    from prunecli.results.rewriting import AttentionSharing, FfnSharing, SharedGroup

    parameters, is_ffn = _parameters(shown, plan), plan.part == "FFN"
    layers: Mapping[str, Any] = plan.layers
    groups = []
    for group in plan.groups:
        own: dict[str, Any] = {"width": group.width, "scale": group.scale}
        if not is_ffn:
            own = {"heads": [*layers[group.sources[0]].heads]}
        groups.append(
            SharedGroup(
                owner=group.owner,
                members=[*group.members],
                sources=[*group.sources],
                init=group.init or "keep",
                parameters=parameters[group.owner],
                **own,
            )
        )
    kind, more = (FfnSharing, {"sparse": plan.sparse}) if is_ffn else (AttentionSharing, {})
    return shown.document(kind, plan.seed, groups=groups, removed=plan.removed, **more)


def share_blocks(shown: Shown, plan: SharePlan) -> Iterator[Any]:
    """Yield layers, what their FFN or attention is made of, its hidden units or heads, its parameters; the sizes."""
    from prunecli.model.parts import ranges

    parameters = _parameters(shown, plan)

    def names(parts: Iterable[str]) -> str:
        """`encoder 0-5, cross 0, 3`."""
        runs = groupby((plan.layers[name] for name in parts), key=attrgetter("kind"))
        return ", ".join(f"{kind} {ranges([layer.layer for layer in run])}" for kind, run in runs)

    title, size = ("Feed-forward networks", "width") if plan.part == "FFN" else ("Attention", "heads")
    rows, alone = [], []

    def add(parts: Iterable[str], what: str, units: int | None, total: int | None) -> None:
        cells = {
            size: None if units is None else f"{units:,}",
            "parameters": None if total is None else f"{total:,}",
        }
        rows.append({"layers": names(parts), plan.part: what, **cells})

    for group in plan.groups:
        if group.is_merged or len(group.members) > 1:
            add(group.members, _made(group), group.width, parameters[group.owner])
        else:
            alone.append(group)
    for (_, width), run in groupby(alone, key=lambda group: (plan.layers[group.owner].kind, group.width)):
        owners = [group.owner for group in run]
        what = "as before" if len(owners) == 1 else "as before, one each"
        add(owners, what, width, sum(map(parameters.__getitem__, owners)))
    if plan.sparse:
        add(plan.sparse, "experts, as before", None, None)
    if plan.removed:
        add(plan.removed, "none", 0, 0)
    yield console.table(title, rows, text_columns=2)
    yield from shown.end_blocks()


def _parameters(shown: Shown, plan: SharePlan) -> dict[str, int]:
    """Owner of a group -> parameters of its FFN or attention."""
    sizes = {output.name: output.info.numel for output in shown.result.rewrite.outputs}
    return {
        group.owner: sum(sizes.get(name, 0) for name in plan.layers[group.owner].tensor_names)
        for group in plan.groups
    }


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


class ShareAttention(RewritingOptions, AttentionOptions):
    """Options of the command."""

    LEFT_OUT = frozenset({"stream", "explain"})

    output: Path = output_option("shared-attention")


@command(ShareAttention)
def share_attention(options: ShareAttention) -> None:
    """Share or drop self- and cross-attention. Weights are streamed: no model is built.

    Each layer keeps its own norms and its own part of the cache. The result loses more quality than one with shared
    FFNs. Recover the quality with prunecli finetune.
    """
    options.check_groups(3)
    with options.open() as opened:
        plan = prunecli.plan_attention(opened, options)
        _share(opened, options, plan)
