"""Match statistics with a checkpoint: read several files, rename layers, refuse statistics of another model."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TypeVar

from prunecli.errors import StatisticsError
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.depth import renaming_since
from prunecli.model.quantised import method_of
from prunecli.results.document import Statistics
from prunecli.results.gates import GateStatistics
from prunecli.results.unit_scores import Scores, command_of, read_scores

COLLECT = "Collect the gates of this checkpoint."

Given = TypeVar("Given", bound=Statistics)


def matching(
    given: Given | Sequence[Path],
    read: Callable[[Path], Given],
    match: Callable[[Given], Given],
    remedy: str,
) -> Given:
    """Statistics, or those of several files merged, that match a checkpoint.

    Args:
        given: the statistics, or their files.
        read: returns the statistics in one file.
        match: `match_scores` or `match_gates`, with the checkpoint bound.
        remedy: remedy for a missing file.

    Raises:
        StatisticsError: a file is missing, damaged or of another model; the message names the file. Or the files do
            not go together.
    """
    if not isinstance(given, Sequence):
        return match(given)
    parts = []
    for path in given:
        if not path.exists():
            raise StatisticsError(f"{path}: no such file", remedy)
        statistics = read(path)
        try:
            parts.append(match(statistics))
        except StatisticsError as error:
            raise StatisticsError(f"{path}: {error.message}", error.remedy) from error
    return parts[0].merged(parts, [str(path) for path in given])


def match_gates(statistics: GateStatistics, checkpoint: Checkpoint) -> GateStatistics:
    """The statistics of the sparse layers that `checkpoint` still has, under their present names.

    Statistics of the model that a pruned checkpoint was made from match too: ids are the original ones. For a
    quantised checkpoint, statistics of the model before quantisation or of another quantised copy match if the
    routers are equal.

    Raises:
        StatisticsError: another family, fingerprint or top-k, other sparse layers, another number of experts.
    """
    rename = renaming_since(checkpoint.resolved.family, checkpoint.structure, statistics.fingerprint)
    if rename is not None:
        now = {
            index: new for index, name in enumerate(statistics.layers) if (new := rename(name)) is not None
        }
        entries = {entry: sums.of_layers([*now]) for entry, sums in statistics.entries.items()}
        statistics = statistics.model_copy(update={"layers": tuple(now.values()), "entries": entries})
    layers = checkpoint.require_routed()
    family = checkpoint.resolved.family.model_type
    for what, stated, held in (
        ("family", [statistics.model_type or family], [family]),
        ("experts per layer", [statistics.num_experts], sorted({layer.original_experts for layer in layers})),
        ("sparse layers", [*statistics.layers], [layer.name for layer in layers]),
        ("experts that the router picks", [statistics.top_k], [max(layer.top_k for layer in layers)]),
    ):
        if stated != held:
            said, has = (shorten(", ".join(map(str, own)), 120) for own in (stated, held))
            raise StatisticsError(
                f"The statistics are of another model than {checkpoint.path} ({what}: {said}; that model: {has}).",
                COLLECT,
            )
    if other_form(statistics, checkpoint) is None:
        return statistics
    reason = "its weights are others"
    if checkpoint.quantised or method_of(checkpoint.config):
        if statistics.model.routers == checkpoint.router_fingerprint:
            return statistics
        reason = (
            "its routers have other values, so that it was not quantised from that, or its routers were changed with it"
            if statistics.model.routers
            else "it is quantised, and the file does not say which routers the model had that was run"
        )
    raise StatisticsError(f"The statistics are of another model than {checkpoint.path}: {reason}.", COLLECT)


def other_form(statistics: GateStatistics, checkpoint: Checkpoint) -> str | None:
    """The fingerprint of the model that was run, if that is neither `checkpoint` nor one that it was made from."""
    known = {checkpoint.fingerprint, *checkpoint.structure.fingerprints()}
    return None if statistics.fingerprint in known else statistics.fingerprint


def match_scores(scores: Scores, checkpoint: Checkpoint, axes: Sequence[Axis]) -> Scores:
    """The scores of the axes that `checkpoint` still has, under their present names.

    Scores of the model that a pruned checkpoint was made from match too: ids are the original ones, and scores of
    removed units are ignored. Hidden units have no original ids: a checkpoint whose FFNs were changed since does not
    match.

    Args:
        scores: read from a file or just collected.
        checkpoint: the checkpoint to prune.
        axes: axes of the checkpoint that must have scores.

    Raises:
        StatisticsError: another fingerprint, or units of the checkpoint that were not scored.
    """
    structure = checkpoint.structure
    again = f"Score the {scores.kind}s of this checkpoint: prunecli {command_of(scores.kind)}."
    made_of = [step.get("source", {}).get("fingerprint") for step in structure.history]
    known = [*made_of, checkpoint.fingerprint]
    since = structure.history[known.index(scores.fingerprint) :] if scores.fingerprint in known else ()
    changed = scores.kind == "unit" and any(step["command"] in ("prune-ffn", "share-ffn") for step in since)
    if scores.fingerprint not in known or changed:
        raise StatisticsError(
            f"The scores are of another model than {checkpoint.path}, or of another pruning of it.", again
        )
    later = renaming_since(checkpoint.require_architecture(), structure, scores.fingerprint)

    def rename(name: str) -> str | None:
        own = checkpoint.without_root(name)  # prunecli 0.2 called the parts of a base model as a headed one's
        return own if later is None else later(own)

    if any(rename(name) != name for name in scores.ids):
        fields = {
            field: {
                new: value
                for name, value in getattr(scores, field).items()
                if (new := rename(name)) is not None
            }
            for field in ("ids", "values", "counts", "distances", "p_values")
        }
        scores = scores.model_copy(update={**fields, "also": [], "best": {}, "reported": None})
    for axis in axes:
        held = {*scores.ids.get(axis.name, ())}
        if lacking := [number for number in axis.ids if number not in held]:
            raise StatisticsError(
                f"The scores lack {axis.kind} {lacking[0]} of {axis.module}, which {checkpoint.path} holds.",
                again,
            )
    return scores


def scores_for(checkpoint: Checkpoint, given: Scores | tuple[Path, ...], axes: Sequence[Axis]) -> Scores:
    """The scores of one or several files, merged, of this checkpoint or of one that it was made from.

    Args:
        given: scores, or their files.
        axes: axes of one kind that must have scores.

    Raises:
        StatisticsError: damaged files, of another model, or that do not go together.
    """
    match, kind = partial(match_scores, checkpoint=checkpoint, axes=axes), axes[0].kind
    remedy = f"Score the {kind}s first: prunecli {command_of(kind)}."
    return matching(given, partial(read_scores, kind=kind), match, remedy)
