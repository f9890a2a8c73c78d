"""The importance of heads on two texts or tasks, compared (1905.10650, 3.4 and Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError
from prunecli.model.attention import KINDS, kind_and_layer
from prunecli.model.axes import module_of
from prunecli.results.document import Model, header
from prunecli.results.similarity import ComparedHead, Correlation, HeadComparison, Scored
from prunecli.results.unit_scores import LOWER_IS_BETTER, Scores

LEAST_HEADS = 3
"""Two values always lie on a line."""


def compare_heads(scores: tuple[Scores, Scores], files: tuple[str, str]) -> HeadComparison:
    """head-comparison.json: correlation of the importance of the heads that both files have, by name and original id.

    Args:
        scores: of one model, or of two of one shape (such as one model fine-tuned for two tasks); of any method and
            metric but all-but-one, which compares heads of one layer only.
        files: how the two are called.

    Raises:
        StatisticsError: of different families, without common heads, or of the method all-but-one.
    """
    first, second = scores
    values = [
        {
            (module_of(name), head): value
            for name, own in one.importance().items()
            for head, value in zip(one.ids[name], own.tolist(), strict=True)
        }
        for one in scores
    ]
    common = [key for key in values[0] if key in values[1]]
    differ = f"{files[0]} and {files[1]} have no head in common."
    if first.model_type != second.model_type:
        types = f"the type {first.model_type}, {files[1]} of the type {second.model_type}."
        common, differ = [], f"{files[0]} is of a model of {types}"
    if not common:
        raise StatisticsError(
            differ, "Compare scores of one model, or of two with the same layers and heads."
        )
    heads = []
    for attention, head in common:
        kind, layer = kind_and_layer(first.model_type, attention)
        pair = {name: own[attention, head] for name, own in zip(("first", "second"), values, strict=True)}
        heads.append(ComparedHead(attention=attention, kind=kind, layer=layer, head=head, **pair))
    models = [Model(fingerprint=one.fingerprint, model_type=one.model_type) for one in scores]
    compared = []
    for file, one in zip(files, scores, strict=True):
        shared = {"method", "task", "examples", "metric", "base"}
        stated: dict[str, Any] = one.model_dump(include=shared, exclude_none=True)
        if one.per:
            stated["importance"] = one.per
        compared.append(Scored(file=file, **stated))
    return HeadComparison(
        **{**header(HeadComparison.FORMAT, [], None), "models": models},
        first=compared[0],
        second=compared[1],
        correlations=[correlation("all", heads), *(correlation(kind, own) for kind, own in by_kind(heads))],
        left_out=len(set(values[0]) ^ set(values[1])),
        heads=heads,
    )


def by_kind(heads: Sequence[ComparedHead]) -> list[tuple[str, list[ComparedHead]]]:
    """Kind of attention and its heads, in the order of `KINDS`."""
    kinds = sorted({head.kind for head in heads}, key=lambda kind: [*KINDS, kind].index(kind))
    return [(kind, [head for head in heads if head.kind == kind]) for kind in kinds]


def correlation(of: str, heads: Sequence[ComparedHead]) -> Correlation:
    """Pearson's r of the two importances and Spearman's of their ranks, with two-sided p-values."""
    pair = points(heads)
    found: dict[str, float] = {}
    if len(heads) >= LEAST_HEADS and all(len(np.unique(values)) > 1 for values in pair):
        from scipy.stats import pearsonr, spearmanr

        for name, test in (("pearson", pearsonr), ("spearman", spearmanr)):
            result = test(*pair)
            found |= {name: round(float(result.statistic), 6), f"{name}_p": float(result.pvalue)}
    return Correlation(of=of, heads=len(heads), **found)


def points(heads: Sequence[ComparedHead]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The two importances: `[heads]` each."""
    values = np.array([(head.first, head.second) for head in heads], np.float64)
    return values[:, 0], values[:, 1]


def stated_correlation(correlation: Correlation | None) -> str:
    """Return ', r = 0.52 (p = 0.001)', or nothing if the correlation is unknown."""
    if correlation is None or correlation.pearson is None:
        return ""
    return f", r = {correlation.pearson:.2f} (p = {correlation.pearson_p:.2g})"


def axis_title(scored: Scored) -> str:
    """Label of an axis: the file, and what its importance is."""
    change = "gained" if scored.metric in LOWER_IS_BETTER else "lost"
    what = "I_h" if scored.method == "gradient" else f"{scored.metric} {change} without the head"
    return f"{scored.file}: {what}"
