"""Scores of units, made by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prunecli.model.axes import axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.find_axes import axes_of
from prunecli.results.document import Model
from prunecli.results.unit_scores import MEASURES, Kind, Measure, Scores


def scores_by_hand(
    values: Mapping[str, Sequence[float] | np.ndarray],
    kind: Kind = "head",
    method: str = "gradient",
    *,
    fingerprint: str = "sha256:00",
    model_type: str = "bert",
    task: str = "mlm",
    examples: int = 4,
    per: str = "example",
    **fields: Any,
) -> Scores:
    """Scores whose fields by axis are given by module: attention's name -> values of its heads 0, 1, ..."""
    made = {"values": values, "ids": {name: range(len(own)) for name, own in values.items()}}
    made |= {"counts": dict.fromkeys(values, examples), **fields}
    for name, value in made.items():
        if isinstance(value, Mapping):
            made[name] = {axis_name(module, kind): own for module, own in value.items()}
    if MEASURES.get(method, Measure()).additive:
        made["per"] = per
    else:
        del made["counts"]
    return Scores(
        format=Scores.FORMAT,
        models=[Model(fingerprint=fingerprint, model_type=model_type)],
        kind=kind,
        method=method,
        task=task,
        examples=examples,
        **made,
    )


def scores_of_all(
    source: Checkpoint,
    kind: Kind,
    draw: np.random.Generator,
    values: Mapping[str, np.ndarray] | None = None,
    **fields: Any,
) -> Scores:
    """A value for each unit of a checkpoint; by default random ones."""
    axes = axes_of(source, kind)
    return scores_by_hand(
        values or {axis.module: draw.random(len(axis.ids)) for axis in axes},
        kind,
        ids={axis.module: axis.ids for axis in axes},
        fingerprint=source.fingerprint,
        model_type=source.model_type,
        **fields,
    )
