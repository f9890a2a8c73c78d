"""What each tensor of the pruned checkpoint is made of: pure, nothing is read but names and shapes.

Experts are pruned by dropping their weights and their rows of the router (2212.09811).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prunecli.errors import UsageError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.mixtures import SparseLayer
from prunecli.model.structure import Structure
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.stream import Copy, Output, Rows


def rewrite(
    checkpoint: Checkpoint, kept: Mapping[str, Sequence[int]], dtype: str | None = None
) -> tuple[Structure, tuple[Output, ...]]:
    """The structure and the tensors, in the order of the source, of the checkpoint with only `kept` experts.

    Kept experts become `expert_0 … expert_{n-1}` in the given order; the router's rows are those of their
    places in the file. A layer that keeps all of its experts in their order is copied as it is.

    Args:
        checkpoint: the source.
        kept: layer's name -> original ids; a layer that is left out keeps all.
        dtype: type of the floating-point tensors (`float16`, `F16`, …); None: as stored.

    Raises:
        UsageError: an id that the layer does not hold, or fewer than the router picks.
    """
    target = None if dtype is None else parse_dtype(dtype)
    layers = {layer.name: layer for layer in checkpoint.require_mixtures()}
    top_k = checkpoint.require_architecture().top_k or 1
    changed = {}
    for name, ids in kept.items():
        _check(layers, name, ids, top_k)
        if tuple(ids) != layers[name].experts:
            changed[name] = tuple(ids)
    renamed, dropped, routers = _changes([layers[name] for name in layers if name in changed], changed)
    outputs = []
    for name, info in checkpoint.tensors.items():
        if name in dropped:
            continue
        rows = routers.get(name)
        shape = info.shape if rows is None else (len(rows), *info.shape[1:])
        expression = Copy(name) if rows is None else Rows(name, rows)
        outputs.append(Output(renamed.get(name, name), info.cast(target).dtype, shape, expression))
    structure = checkpoint.structure
    if changed:
        originals = {name: layers[name].original_experts for name in changed}
        structure = structure.keeping_experts(changed, originals)
    return structure, tuple(outputs)


def _check(layers: Mapping[str, SparseLayer], name: str, ids: Sequence[int], top_k: int) -> None:
    if name not in layers:
        raise UsageError(f"{name} is not a sparse layer of this model.", f"It has {', '.join(layers)}.")
    stray = sorted(set(ids) - set(layers[name].experts))
    if stray or len(set(ids)) != len(ids):
        what = f"has no expert {stray[0]}" if stray else "cannot keep an expert twice"
        raise UsageError(f"{name} {what}.", "Ids are those of the original model.")
    if len(ids) < top_k:
        raise UsageError(
            f"{name} would keep {len(ids)} experts; the router picks {top_k} for each token.",
            "Keep more experts.",
        )


def _changes(
    layers: Sequence[SparseLayer], kept: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, str], set[str], dict[str, tuple[int, ...]]]:
    """New names of moved expert tensors, tensors that go, and router tensors -> rows that stay."""
    renamed: dict[str, str] = {}
    dropped: set[str] = set()
    routers: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        position = {expert: index for index, expert in enumerate(layer.experts)}
        rows = tuple(position[expert] for expert in kept[layer.name])
        routers.update(dict.fromkeys(layer.router_tensors, rows))
        gone = set(range(layer.num_experts)) - set(rows)
        for suffix in layer.expert_tensors:
            dropped.update(layer.expert_tensor(index, suffix) for index in gone)
            renamed.update(
                (layer.expert_tensor(old, suffix), layer.expert_tensor(new, suffix))
                for new, old in enumerate(rows)
            )
    return renamed, dropped, routers
