"""What `share-ffn` does, as a table and as JSON: the FFNs that are stored, those that go, those that stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.commands import console

if TYPE_CHECKING:
    from rich.table import Table

    from prunecli.checkpoint.ffn import FfnLayer
    from prunecli.checkpoint.reader import Checkpoint
    from prunecli.methods.ffn.decide import Decision, Options
    from prunecli.methods.ffn.plan import FfnPlan, Group
    from prunecli.pipeline import Rewrite, Summary

FORMAT = "prunecli.ffn-plan/1"

COLUMNS = ("Layers", "FFN", "Width", "Parameters")
INITS = {"mean": "mean of {}", "first": "the first", "last": "the last", "concat": "{} side by side"}


def ffn_payload(
    checkpoint: Checkpoint,
    decision: Decision,
    made: Rewrite,
    summary: Summary,
    options: Options,
    output: Path | None,
) -> dict[str, Any]:
    """What `--json` prints."""
    from prunecli.checkpoint.documents import header

    parameters = _parameters(checkpoint, decision, made)
    groups = [
        {
            "owner": group.owner,
            "members": list(group.members),
            "sources": list(group.sources),
            "init": group.init or "keep",
            "width": group.width,
            "scale": group.scale,
            "parameters": parameters[group.owner],
        }
        for group in decision.plan.groups
    ]
    return {
        **header(FORMAT, [checkpoint], options.seed),
        "output": None if output is None else str(output),
        "arguments": dict(decision.step["arguments"]),
        "groups": groups,
        "removed": list(decision.plan.removed),
        "sparse": list(decision.plan.sparse),
        "parameters_before": summary.parameters_before,
        "parameters_after": summary.parameters_after,
        "bytes_before": summary.bytes_before,
        "bytes_after": summary.bytes_after,
    }


def show_ffns(
    checkpoint: Checkpoint, decision: Decision, made: Rewrite, summary: Summary, output: Path | None
) -> None:
    """The table and the sizes, on stdout; `output` is None after a dry run."""
    from prunecli.architectures import REDUCED_PREFIX

    console.show(ffn_table(checkpoint, decision.plan, _parameters(checkpoint, decision, made)))
    before, after = summary.parameters_before, summary.parameters_after
    console.out(
        f"parameters {before:,} -> {after:,} ({after / before:.1%}), "
        f"bytes {console.bytes_text(summary.bytes_before)} -> {console.bytes_text(summary.bytes_after)} "
        f"({summary.bytes_after / summary.bytes_before:.1%})"
    )
    if output is None:
        console.out("Dry run: nothing is written.")
        return
    reduced = str(made.config.get("model_type")).startswith(REDUCED_PREFIX)
    opens = (
        "opens with prunecli, or from_pretrained(…, trust_remote_code=True)" if reduced else "stock layout"
    )
    console.out(f"Written: {output} ({opens})")


def _parameters(checkpoint: Checkpoint, decision: Decision, made: Rewrite) -> dict[str, int]:
    """Owner of a group -> parameters of its FFN."""
    from prunecli.checkpoint.ffn import ffn_layers

    tensors = {layer.name: layer.tensors for layer in ffn_layers(checkpoint)}
    sizes = {output.name: output.info.numel for output in made.outputs}
    return {
        group.owner: sum(sizes[f"{group.owner}.{suffix}"] for suffix in tensors[group.owner])
        for group in decision.plan.groups
    }


def ffn_table(checkpoint: Checkpoint, plan: FfnPlan, parameters: Mapping[str, int]) -> Table:
    """Layers, what their FFN is made of, its hidden units, its parameters.

    Args:
        checkpoint: the source.
        plan: the decision.
        parameters: of each group's FFN, by its owner.
    """
    from prunecli.checkpoint.ffn import ffn_layers

    layers = {layer.name: layer for layer in ffn_layers(checkpoint)}
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
    return ", ".join(
        f"{side} {_ranges([layer.layer for layer in run])}"
        for side, run in groupby(layers, key=lambda layer: layer.side)
    )


def _ranges(numbers: Sequence[int]) -> str:
    """`0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
