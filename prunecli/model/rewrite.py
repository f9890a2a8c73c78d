"""A decision made concrete: what every method's `rewrite_…` returns, and `prunecli.pipeline.apply` carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prunecli.errors import UnsupportedModelError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.opening import result_config
from prunecli.model.stock import stock_support
from prunecli.model.structure import Structure
from prunecli.tensors.stream import Output


@dataclass(frozen=True)
class Rewrite:
    """Everything about a result that is known before a byte is read.

    Attributes:
        structure: of the result, its history included.
        outputs: every tensor of the result.
        config: config.json of the result, but for the type of its weights.
        files: side files that differ from the source's, by name; None: it is left out.
    """

    structure: Structure
    outputs: tuple[Output, ...]
    config: Mapping[str, Any]
    files: Mapping[str, bytes | None] = field(default_factory=dict)


def rewritten(
    source: Checkpoint,
    structure: Structure,
    outputs: tuple[Output, ...],
    step: Mapping[str, Any] | None = None,
) -> Rewrite:
    """The rewrite of `source` to this structure, `step` added to its history, with the config.json that says so.

    Raises:
        UnsupportedModelError: no stock class runs the result, and prunecli runs the family in no other way.
        CheckpointError: config.json lacks a size, or says what cannot be.
    """
    source.refuse_constants()
    if source.runs_stock and not (
        (support := stock_support(source, structure)).is_stock or support.is_fitted
    ):
        heads = ", prune-heads --uniform" if source.resolved.family.head_width is not None else ""
        raise UnsupportedModelError(
            f"{source.path}: {support.reason}; models of type {source.model_type} run in their stock class alone",
            f"Use {support.nearest or f'prune-experts, prune-layers{heads} or trim-vocabulary'}.",
        )
    if step:
        structure = structure.after(step)
    return Rewrite(structure, outputs, result_config(source, structure))
