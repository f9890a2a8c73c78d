"""What attentions and FFNs have in common: which are shared, removed or of another width, and what cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prunecli.errors import CheckpointError
from prunecli.model.attention import AttentionLayer
from prunecli.model.declared import Sizes
from prunecli.model.ffn import FfnLayer, is_sparse, within
from prunecli.model.structure import Structure

REMEDY = "config.json and the weights are not of one checkpoint; copy both again."


def check_parts(sizes: Sizes, structure: Structure) -> None:
    """Refuse a structure that shares, removes or resizes what it cannot.

    Raises:
        CheckpointError: an attention or FFN that the model lacks, or cannot do without; one that is shared with
            another kind, or with one that has no tensors of its own; a change of a mixture of experts.
    """
    mixture, ffn, found = ("mixture",), ("FFN",), sizes.family.found
    kinds: dict[str, tuple[str, ...]] = {}  # name of each -> equal for those that may share
    for stack in sizes.family.stacks:
        for number, layer in sizes.layers(stack):
            kinds[within(layer, stack.ffn)] = mixture if is_sparse(sizes, structure, stack, number) else ffn
            for record in stack.attentions:
                names = [spec.name for spec in record.tensors]
                # Where each layer has one module, an attention and an FFN may have the same name.
                if found is None or any(found.holds(stack, structure, number, name) for name in names):
                    kinds[f"{layer}.{record.name}"] = stack.side, record.name
    shared, removed, widths = structure.shared, structure.removed, structure.widths
    for name in (*shared, *shared.values(), *sorted(removed), *widths):
        if name not in kinds or (name in widths and kinds[name] not in (mixture, ffn)):
            what = "FFN" if name in widths else "FFN or attention"
            raise CheckpointError(f"config.json names {name}, which is no {what} of the model", REMEDY)
        if kinds[name] == mixture:
            reason = "a mixture of experts can be neither shared nor removed nor of another width"
            raise CheckpointError(f"config.json changes {name}: {reason}", REMEDY)
    for name, owner in shared.items():
        faults = {
            "of another kind": kinds[name] != kinds[owner],
            "removed": owner in removed,
            "shared": owner in shared,
        }
        if fault := next((fault for fault, holds in faults.items() if holds), None):
            raise CheckpointError(f"config.json: {name} shares with {owner}, which is {fault}", REMEDY)
    for stack in sizes.family.stacks:
        for record in stack.attentions:
            own = [name for name, kind in kinds.items() if kind == (stack.side, record.name)]
            has_table = any(spec.first for spec in record.tensors)
            if has_table and own and own[0] in removed and not removed.issuperset(own):
                raise CheckpointError(
                    f"config.json: {own[0]} is removed, whose table of positions other layers use", REMEDY
                )


def describe_parts(parts: Sequence[AttentionLayer] | Sequence[FfnLayer], widths: Mapping[str, int]) -> str:
    """How they differ from the stock ones, in a line: "encoder 1-5 share layer 0's; decoder 0-5 removed"; "": nohow.

    Args:
        parts: every attention, or every FFN, of the model.
        widths: `Structure.widths`.
    """
    by_name = {part.name: part for part in parts}
    numbers_by_change: dict[tuple[str, str], list[int]] = {}
    for part in parts:
        if part.removed:
            what = "removed"
        elif part.is_shared:
            owner = by_name[part.owner]
            what = f"share {'layer' if owner.kind == part.kind else owner.kind} {owner.layer}'s"
        elif part.name in widths:
            what = f"of width {widths[part.name]:,}"
        else:
            continue
        numbers_by_change.setdefault((part.kind, what), []).append(part.layer)
    return "; ".join(
        f"{where} {ranges(numbers)} {what if len(numbers) > 1 else what.replace('share ', 'shares ')}"
        for (where, what), numbers in numbers_by_change.items()
    )


def ranges(ascending: Sequence[int]) -> str:
    """ "0-3, 5" """
    ends_of_runs: list[list[int]] = []
    for number in ascending:
        if ends_of_runs and number == ends_of_runs[-1][-1] + 1:
            ends_of_runs[-1][1:] = [number]
        else:
            ends_of_runs.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ends_of_runs)
