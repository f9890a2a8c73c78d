"""Means of translation scores by source, by target, and by groups of languages such as resource classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from prunecli.evaluation.scoring import Scores, mean_scores, scores_json

Pair = tuple[str, str]
"""Source and target."""


def grouped_means(
    scores: Mapping[Pair, Scores], groups: Mapping[str, str], baseline: Mapping[Pair, Scores] | None = None
) -> dict[str, Any]:
    """The fields `by_source`, `by_target` and, with `groups`, `by_group` of a checkpoint in evaluation.json.

    Every pair counts the same. Without groups nothing is said where all pairs have one source or one target: the means
    are those of all pairs, or the pairs themselves.

    Args:
        scores: pair -> its scores.
        groups: language -> group, of every language of the pairs; empty: none.
        baseline: those of the checkpoint that this one is compared with; None: it is the first.
    """
    compared = {pair: (None if baseline is None else baseline[pair], own) for pair, own in scores.items()}
    several = all(len({pair[side] for pair in scores}) > 1 for side in (0, 1))
    if not groups and not several:
        return {}
    means: dict[str, Any] = {
        "by_source": {name: _mean(own) for name, own in _by(compared, lambda pair: pair[0]).items()},
        "by_target": {name: _mean(own) for name, own in _by(compared, lambda pair: pair[1]).items()},
    }
    if groups:
        order = list(dict.fromkeys(groups.values()))
        grouped = _by(compared, lambda pair: (groups[pair[0]], groups[pair[1]]))
        means["by_group"] = [
            {"source": source, "target": target, **_mean(grouped[source, target])}
            for source, target in sorted(grouped, key=lambda pair: tuple(map(order.index, pair)))
        ]
    return means


def differences(compared: Sequence[tuple[Scores, Scores]]) -> dict[str, dict[str, float]]:
    """Metric -> mean, standard deviation (of all pairs: divided by their number), lowest and highest difference.

    Args:
        compared: of each pair the first checkpoint's scores, and those of another.
    """
    spreads = {}
    for metric in compared[0][0].values:
        deltas = [own.values[metric] - first.values[metric] for first, own in compared]
        figures = {
            "mean": fmean(deltas),
            "std": pstdev(deltas),
            "lowest": min(deltas),
            "highest": max(deltas),
        }
        spreads[metric] = {name: round(value, 4) for name, value in figures.items()}
    return spreads


_Compared = tuple[Scores | None, Scores]
"""The first checkpoint's scores, and those of another; None: it is the first."""


def _by(compared: Mapping[Pair, _Compared], key: Callable[[Pair], Any]) -> dict[Any, list[_Compared]]:
    groups: dict[Any, list[_Compared]] = {}
    for pair, both in compared.items():
        groups.setdefault(key(pair), []).append(both)
    return groups


def _mean(compared: list[_Compared]) -> dict[str, Any]:
    mean = {"pairs": len(compared), **scores_json(mean_scores([own for _, own in compared]))}
    both = [(first, own) for first, own in compared if first is not None]
    return {**mean, "difference": differences(both)} if both else mean
