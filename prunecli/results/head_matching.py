"""Head scores of several files, and those of a checkpoint that has changed since: renumbered, merged, refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prunecli.errors import StatisticsError
from prunecli.model.depth import renaming_since
from prunecli.results.header import joined
from prunecli.results.heads import HeadScores

if TYPE_CHECKING:
    from prunecli.model.attention import AttentionLayer
    from prunecli.model.checkpoint import Checkpoint

_ALIKE = {
    "fingerprint": "the models that they are of",
    "model_type": "their model types",
    "task": "their tasks",
    "heads": "the heads that were scored",
    "per": "their importances (per example or per token)",
}
"""What scores must have in common to be added up, and how a message calls it."""


def merge(parts: Sequence[HeadScores], names: Sequence[str] | None = None) -> HeadScores:
    """One score from several of one model: sums and examples are added, so nothing is lost.

    Args:
        parts: at least one; several only of the gradient method.
        names: how messages call them; default: scores 1, 2, ...

    Raises:
        StatisticsError: of different models, heads or tasks, or not sums.
    """
    names = [f"scores {number}" for number in range(1, len(parts) + 1)] if names is None else names
    first = parts[0]
    for name, part in zip(names, parts, strict=True):
        if len(parts) > 1 and part.method != "gradient":
            raise StatisticsError(
                f"{name}: scores of the method {part.method} are no sums, and cannot be merged.",
                "Give one file, or several of --method gradient.",
            )
        for attribute, what in _ALIKE.items():
            if getattr(first, attribute) != getattr(part, attribute):
                raise StatisticsError(
                    f"{names[0]} and {name} cannot be merged: {what} differ.",
                    "Merge only scores of one model, one task and one --importance.",
                )
    kinds = {part.whole_files for part in parts}
    return replace(
        first,
        whole_files=first.whole_files if len(kinds) == 1 else None,
        mixed={True, False} <= kinds,
        examples=sum(part.examples for part in parts),
        values={
            name: sum((part.values[name] for part in parts[1:]), first.values[name]) for name in first.heads
        },
        tokens={name: sum(part.tokens[name] for part in parts) for name in first.tokens},
        texts=tuple(dict.fromkeys(text for part in parts for text in part.texts)),
        split=joined(part.split for part in parts),
    )


def check_matches(scores: HeadScores, checkpoint: Checkpoint, layers: Sequence[AttentionLayer]) -> None:
    """Refuse scores of another model, or of the same after another pruning.

    Those of the model that a pruned checkpoint was made from are right too: ids are the original ones, and heads
    that are no longer there do not matter.

    Args:
        scores: what to check.
        checkpoint: the one at hand.
        layers: its attentions.

    Raises:
        StatisticsError: another fingerprint, or heads of the checkpoint that were not scored.
    """
    known = {checkpoint.fingerprint, *checkpoint.structure.fingerprints()}
    if scores.fingerprint not in known:
        raise StatisticsError(
            f"The scores are of another model than {checkpoint.path}, or of another pruning of it.",
            "Score the heads of this checkpoint: prunecli score-heads.",
        )
    for layer in layers:
        lacking = [head for head in layer.heads if head not in scores.heads.get(layer.name, ())]
        if lacking:
            raise StatisticsError(
                f"The scores lack head {lacking[0]} of {layer.name}, which {checkpoint.path} holds.",
                "Score the heads of this checkpoint: prunecli score-heads.",
            )


def numbered(scores: HeadScores, checkpoint: Checkpoint) -> HeadScores:
    """The scores under the names that the attentions have in `checkpoint`, which may have lost layers since."""
    rename = renaming_since(checkpoint.require_architecture(), checkpoint.structure, scores.fingerprint)
    if rename is None:
        return scores

    def own(values: Mapping[str, Any]) -> dict[str, Any]:
        return {new: value for name, value in values.items() if (new := rename(name)) is not None}

    return replace(
        scores,
        heads=own(scores.heads),
        values=own(scores.values),
        tokens=own(scores.tokens),
        p_values=own(scores.p_values),
        also=(),
        reported=None,
    )
