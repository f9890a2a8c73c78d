"""What each tensor of the pruned checkpoint is made of: pure, nothing is read but names and shapes.

Experts are pruned by dropping their weights and their rows of the router (2212.09811).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prunecli.errors import UsageError
from prunecli.methods.experts.plan import ExpertPlan
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.mixtures import SparseLayer
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.stream import Copy, Output, Rows


def rewrite_experts(checkpoint: Checkpoint, plan: ExpertPlan) -> Rewrite:
    """The checkpoint with only the experts that the plan keeps, its tensors in the order of the source.

    Kept experts become `expert_0 … expert_{n-1}` in the given order; the router's rows are those of their
    places in the file. A layer that keeps all of its experts in their order is copied as it is.

    Raises:
        UsageError: an id that the layer does not hold, or fewer than the router picks.
    """
    target = None if plan.dtype is None else parse_dtype(plan.dtype)
    layers = {layer.name: layer for layer in checkpoint.require_mixtures()}
    top_k = checkpoint.require_architecture().top_k or 1
    changed = {}
    for name, ids in plan.kept.items():
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
    return rewritten(checkpoint, structure, tuple(outputs), plan.step)


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
