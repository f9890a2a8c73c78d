"""A decision saved: what `prune-heads --json` printed, read to be applied again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prunecli.errors import StatisticsError
from prunecli.model.attention import AttentionLayer
from prunecli.tensors.json_files import read_json


def read_selection(path: Path, layers: Sequence[AttentionLayer]) -> dict[str, tuple[int, ...]]:
    """The heads to keep: attention's name -> original ids, in the order in which they are stored.

    Args:
        path: the file.
        layers: the checkpoint's attentions.

    Raises:
        StatisticsError: damaged, or for a model with other attentions or heads.
    """
    from prunecli.results.rewriting import HeadSelection

    kept = HeadSelection.from_json(read_json(path, HeadSelection.FORMAT), path).kept
    stray = sorted(set(kept) ^ {layer.name for layer in layers})
    if stray:
        raise StatisticsError(f"{path}: a selection for another model: {stray[0]} is not in both.")
    return {layer.name: _in_order(path, layer, kept[layer.name]) for layer in layers}


def _in_order(path: Path, layer: AttentionLayer, ids: Sequence[int]) -> tuple[int, ...]:
    absent = sorted(set(ids) - set(layer.heads))
    if absent:
        raise StatisticsError(
            f"{path}: keeps head {absent[0]} of {layer.name}, which the checkpoint does not hold.",
            "Select from the original model.",
        )
    return tuple(head for head in layer.heads if head in ids)
