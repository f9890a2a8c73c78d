"""Means of translation scores by source, by target, and by groups of languages such as resource classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prunecli.evaluation.scoring import Scores, mean_scores, scores_json

Pair = tuple[str, str]
"""Source and target."""


def grouped_means(scores: Mapping[Pair, Scores], groups: Mapping[str, str]) -> dict[str, Any]:
    """The fields `by_source`, `by_target` and, with `groups`, `by_group` of a checkpoint in evaluation.json.

    Every pair counts the same. Without groups nothing is said where all pairs have one source or one target: the means
    are those of all pairs, or the pairs themselves.

    Args:
        scores: pair -> its scores.
        groups: language -> group, of every language of the pairs; empty: none.
    """
    several = all(len({pair[side] for pair in scores}) > 1 for side in (0, 1))
    if not groups and not several:
        return {}
    found: dict[str, Any] = {
        "by_source": {name: _mean(held) for name, held in _by(scores, lambda pair: pair[0]).items()},
        "by_target": {name: _mean(held) for name, held in _by(scores, lambda pair: pair[1]).items()},
    }
    if groups:
        order = list(dict.fromkeys(groups.values()))
        held = _by(scores, lambda pair: (groups[pair[0]], groups[pair[1]]))
        found["by_group"] = [
            {"source": source, "target": target, **_mean(held[source, target])}
            for source, target in sorted(held, key=lambda pair: tuple(map(order.index, pair)))
        ]
    return found


def _by(scores: Mapping[Pair, Scores], key: Callable[[Pair], Any]) -> dict[Any, list[Scores]]:
    found: dict[Any, list[Scores]] = {}
    for pair, own in scores.items():
        found.setdefault(key(pair), []).append(own)
    return found


def _mean(scores: list[Scores]) -> dict[str, Any]:
    return {"pairs": len(scores), **scores_json(mean_scores(scores))}
