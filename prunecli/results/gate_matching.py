"""Gate statistics and the checkpoint that they are used for: layers by their names there, refused where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prunecli.errors import StatisticsError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.depth import renaming_since
from prunecli.model.quantisation import method_of
from prunecli.results.gates import GateStatistics


def numbered(statistics: GateStatistics, checkpoint: Checkpoint) -> GateStatistics:
    """The statistics of the layers that `checkpoint` has, under their names there: it may have lost some since."""
    rename = renaming_since(checkpoint.resolved.family, checkpoint.structure, statistics.fingerprint)
    if rename is None:
        return statistics
    names = [rename(name) for name in statistics.layers]
    kept = [index for index, name in enumerate(names) if name is not None]
    return replace(
        statistics,
        layers=tuple(name for name in names if name is not None),
        entries={pair: sums.of_layers(kept) for pair, sums in statistics.entries.items()},
    )


def check_matches(statistics: GateStatistics, checkpoint: Checkpoint) -> None:
    """Refuse statistics of another model.

    Those of the model that a pruned checkpoint was made from are right too: ids are the original ones. So are, for a
    quantised checkpoint, those of the model before it was quantised, or of another such copy: the routers are equal.

    Raises:
        StatisticsError: another family, fingerprint or top-k, other sparse layers, another number of experts.
    """
    layers = [layer for layer in checkpoint.require_mixtures() if not layer.is_predicting]
    family = checkpoint.resolved.family
    if statistics.model_type not in (None, family.model_type):
        raise StatisticsError(
            f"The statistics are of a model of the family {statistics.model_type}; "
            f"{checkpoint.path} is of {family.model_type}.",
            "Collect the gates of this checkpoint.",
        )
    original = {layer.original_experts for layer in layers}
    if original and original != {statistics.num_experts}:
        raise StatisticsError(
            f"The statistics are of a model with {statistics.num_experts} experts per layer; "
            f"{checkpoint.path} has {', '.join(map(str, sorted(original)))}.",
            "Collect the gates of this checkpoint.",
        )
    if statistics.layers != tuple(layer.name for layer in layers):
        raise StatisticsError(
            f"The statistics are of {len(statistics.layers)} sparse layers ({_ends(statistics.layers)}); "
            f"{checkpoint.path} has {len(layers)} ({_ends([layer.name for layer in layers])}).",
            "Collect the gates of this checkpoint.",
        )
    top_k = max(layer.top_k for layer in layers)
    if statistics.top_k != top_k:
        raise StatisticsError(
            f"The statistics are of a router that picks {statistics.top_k} experts for each token; "
            f"that of {checkpoint.path} picks {top_k}.",
            "Collect the gates of this checkpoint.",
        )
    if other_form(statistics, checkpoint) is None:
        return
    reason = "its weights are others"
    if checkpoint.quantised or method_of(checkpoint.config):
        if statistics.routers == checkpoint.router_fingerprint:
            return
        reason = (
            "its routers have other values, so that it was not quantised from that, or its routers were changed with it"
            if statistics.routers
            else "its weights are others. It is quantised, and the file does not say which routers the model had that "
            "was run, as those of this version do"
        )
    raise StatisticsError(
        f"The statistics are of another model than {checkpoint.path}: {reason}.",
        "Collect the gates of this checkpoint.",
    )


def other_form(statistics: GateStatistics, checkpoint: Checkpoint) -> str | None:
    """The fingerprint of the model that was run, where that is neither `checkpoint` nor what it was made from."""
    known = {
        checkpoint.fingerprint,
        *checkpoint.structure.fingerprints(),
        *checkpoint.structure.statistics_of(),
    }
    return None if statistics.fingerprint in known else statistics.fingerprint


def _ends(names: Sequence[str]) -> str:
    return "none" if not names else names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
