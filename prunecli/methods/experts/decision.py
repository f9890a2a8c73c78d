"""By what experts were chosen, as a `Decision`: what is written of it, printed and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prunecli.errors import PruneError, StatisticsError
from prunecli.methods.experts.budget import Request
from prunecli.methods.experts.measured import MOST_ALONE, Measured
from prunecli.methods.experts.metrics import AIMER, RANDOM, Values
from prunecli.methods.experts.select import KeptExperts, first_of_groups
from prunecli.methods.experts.selection import read_experts
from prunecli.methods.experts.thresholds import in_groups, ranked
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.sparse_layer import SparseLayer

if TYPE_CHECKING:
    from prunecli.methods.experts.options import ExpertOptions

Kept = Mapping[str, Sequence[int]]
"""Layer's name -> original ids."""


@dataclass(frozen=True)
class Chosen:
    """What was chosen in which layers.

    Attributes:
        layers: those that experts were chosen in.
        kept: layer's name -> original ids that stay.
        step: the entry of history.
    """

    layers: Sequence[SparseLayer]
    kept: Kept
    step: Mapping[str, Any]

    def ranked(
        self, values: Mapping[str, Values] | None, groups: int = 1, alone: Mapping[str, Kept] | None = None
    ) -> tuple[Ranked, ...]:
        """The experts of each layer, or of each group of its router, by what they were compared; None: by nothing."""
        found = []
        for layer in self.layers:
            for number, ids in enumerate(in_groups(layer, layer.experts, groups)):
                own = {name: of[layer.name] for name, of in (alone or {}).items() if layer.name in of}
                found.append(
                    Ranked.of(
                        (layer.name, layer.side, layer.layer),
                        ids,
                        self.kept[layer.name],
                        None if values is None else np.asarray(values[layer.name], np.float64)[ids],
                        cut=f"{layer.name}, group {number}" if groups > 1 else "",
                        alone={name: np.isin(sorted(ids), list(those)) for name, those in own.items()},
                    )
                )
        return tuple(found)


def by_values(
    chosen: Chosen, measured: Measured, request: Request, selection: KeptExperts, options: ExpertOptions
) -> Decision:
    """Of a selection by a metric, or drawn at random."""
    if measured.metric == RANDOM:
        return Decision("expert", chosen.ranked(None), how=f"drawn at random (seed {options.seed})")
    is_threshold = request.strategy != "per-layer"
    is_eq5 = is_threshold and request.groups == 1 and measured.mode != "published"
    places = chosen.ranked(measured.values, request.groups, _alone(chosen, measured, request))
    predicting = {layer.name for layer in chosen.layers if layer.is_predicting}
    unlike = predicting if measured.metric != AIMER else set()  # no text enters these
    return Decision(
        "expert",
        tuple(
            replace(place, metric=AIMER)
            if place.name in unlike
            # of published ratios nobody says of how many tokens they are
            else replace(place, tokens=measured.tokens.get(place.name))
            for place in places
        ),
        measured.metric,
        f"{request.strategy}: the highest of each {'group of a layer' if request.groups > 1 else 'layer'} stay",
        f"every layer keeps {request.minimum} at least" if is_threshold else "",
        thresholds=selection.thresholds if is_eq5 else {},
        origin=Origin(texts=measured.texts, split=measured.split).read_from(chosen.step),
    )


def by_file(
    chosen: Chosen, path: Path, originals: Sequence[int], sources: Sequence[str], targets: Sequence[str]
) -> Decision:
    """Of ids that a file names, by language perhaps."""
    pairs = [(source, target) for source, target in product(sources, targets) if source != target]
    alone: dict[str, Kept] = {}
    for source, target in pairs if 1 < len(pairs) <= MOST_ALONE else ():
        try:
            alone[f"{source}-{target}"] = read_experts(path, chosen.layers, originals, (source,), (target,))
        except PruneError:  # a pair that has none of its own
            continue
    return Decision(
        "expert",
        chosen.ranked(None, alone=alone),
        how=f"named in {path.name}",
        origin=Origin(texts=tuple(f"{source}-{target}" for source, target in pairs)).read_from(chosen.step),
    )


def _alone(chosen: Chosen, measured: Measured, request: Request) -> dict[str, dict[str, tuple[int, ...]]]:
    """Language or text -> layer's name -> as many experts as stay, those that would for it alone."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, values in measured.alone.items():
        for layer in chosen.layers:
            if layer.name not in values:
                continue
            try:
                order = ranked(layer, values[layer.name])[0]
            except StatisticsError:  # it has no token here
                continue
            count = len(chosen.kept[layer.name])
            found.setdefault(name, {})[layer.name] = first_of_groups(layer, order, count, request.groups)
    return found
