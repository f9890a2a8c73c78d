"""The importance of heads on two texts or tasks, compared (1905.10650, 3.4 and Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prunecli.analysis.plots import PANEL, hide_spines, new_figure
from prunecli.errors import StatisticsError
from prunecli.model.attention import KIND_NAMES, KINDS, kind_and_layer
from prunecli.model.axes import module_of
from prunecli.results.document import Model
from prunecli.results.header import header
from prunecli.results.similarity import ComparedHead, Correlation, HeadComparison, Scored
from prunecli.results.unit_scores import Scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    if first.model_type != second.model_type:
        raise StatisticsError(
            f"{files[0]} is of a model of the type {first.model_type}, {files[1]} of the type {second.model_type}.",
            "Compare scores of one model, or of two with the same layers and heads.",
        )
    values = [_by_head(one) for one in scores]
    common = [key for key in values[0] if key in values[1]]
    if not common:
        raise StatisticsError(
            f"{files[0]} and {files[1]} have no head in common.",
            "Compare scores of one model, or of two with the same layers and heads.",
        )
    heads = []
    for attention, head in common:
        kind, layer = kind_and_layer(first.model_type, attention)
        importance = (value[attention, head] for value in values)
        pair = dict(zip(("first", "second"), importance, strict=True))
        heads.append(ComparedHead(attention=attention, kind=kind, layer=layer, head=head, **pair))
    models = [Model(fingerprint=one.fingerprint, model_type=one.model_type) for one in scores]
    return HeadComparison(
        **{**header(HeadComparison.FORMAT, [], None), "models": models},
        first=_scored(files[0], first),
        second=_scored(files[1], second),
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
    first, second = points(heads)
    if len(heads) < LEAST_HEADS or len(np.unique(first)) == 1 or len(np.unique(second)) == 1:
        return Correlation(
            of=of, heads=len(heads), pearson=None, pearson_p=None, spearman=None, spearman_p=None
        )
    from scipy.stats import pearsonr, spearmanr

    by_value, by_rank = pearsonr(first, second), spearmanr(first, second)
    return Correlation(
        of=of,
        heads=len(heads),
        pearson=round(float(by_value.statistic), 6),
        pearson_p=float(by_value.pvalue),
        spearman=round(float(by_rank.statistic), 6),
        spearman_p=float(by_rank.pvalue),
    )


def points(heads: Sequence[ComparedHead]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The two importances: `[heads]` each."""
    values = np.array([(head.first, head.second) for head in heads], np.float64)
    return values[:, 0], values[:, 1]


def _by_head(scores: Scores) -> dict[tuple[str, int], float]:
    return {
        (module_of(name), head): value
        for name, own in scores.importance().items()
        for head, value in zip(scores.ids[name], own.tolist(), strict=True)
    }


def _scored(file: str, scores: Scores) -> Scored:
    gradient = scores.method == "gradient"
    return Scored(
        file=file,
        method=scores.method,
        task=scores.task,
        examples=scores.examples,
        **({"importance": scores.per} if gradient else {"metric": scores.metric, "base": scores.base}),
    )


def scatter_figure(comparison: HeadComparison) -> Figure:
    """A point for each head (Figure 2): its importance in the first file against that in the second, by kind.

    Raises:
        PruneError: matplotlib is not installed.
    """
    figure, ((axes,),) = new_figure(*PANEL)
    stated = {one.of: one for one in comparison.correlations}
    for kind, heads in by_kind(comparison.heads):
        name = KIND_NAMES.get(kind, kind)
        axes.scatter(*points(heads), s=14, alpha=0.7, label=f"{name}{_r(stated[kind])}")
    axes.set_xlabel(axis_title(comparison.first))
    axes.set_ylabel(axis_title(comparison.second))
    axes.set_title(f"Importance of {len(comparison.heads)} heads{_r(stated['all'])}", fontsize=10)
    axes.axhline(0, color="gray", linewidth=0.6)
    axes.axvline(0, color="gray", linewidth=0.6)
    axes.legend(fontsize=8)
    hide_spines(axes, "top", "right")
    return figure


def _r(correlation: Correlation) -> str:
    return (
        ""
        if correlation.pearson is None
        else f", r = {correlation.pearson:.2f} (p = {correlation.pearson_p:.2g})"
    )


def axis_title(scored: Scored) -> str:
    """What the importance of a file is, and of which."""
    what = "I_h" if scored.method == "gradient" else f"{scored.metric} lost without the head"
    if scored.metric in ("loss", "perplexity"):
        what = f"{scored.metric} gained without the head"
    return f"{scored.file}: {what}"
