"""`compare-languages` for language models: compare the experts that texts select, and importance vectors of texts.

The method is that of 2212.09811 for languages (6.2, 6.3), with the selections of `prune-experts`: the same number of
experts in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from prunecli.analysis.language_experts import LinkageMethod, cluster, feature_vector, jaccard_matrix
from prunecli.errors import StatisticsError
from prunecli.methods.experts.metrics import aggregate_texts, default_metric, metric_values
from prunecli.results.document import Model
from prunecli.results.gates import GateStatistics
from prunecli.results.header import header
from prunecli.results.languages import TextLayer, Texts
from prunecli.selection.select import Budget, select
from prunecli.text.parallel import groups_of


@dataclass(frozen=True)
class TextOptions:
    """Options of `compare_by_text`.

    Attributes:
        ratio: fraction of the experts removed in each layer.
        metric: as in `prune-experts`; None: its default.
        minimum: experts that every layer keeps; None: the router's top-k.
        linkage: how clusters join.
        texts: which; empty: all.
        families: text -> family, for the colours of the tree; empty: none.
    """

    ratio: float = 0.75
    metric: str | None = None
    minimum: int | None = None
    linkage: LinkageMethod = "ward"
    texts: tuple[str, ...] = ()
    families: Mapping[str, str] = field(default_factory=dict)


def compare_by_text(statistics: GateStatistics, options: TextOptions, files: Sequence[str] = ()) -> Texts:
    """texts.json; `files` are names of the statistics.

    Raises:
        StatisticsError: a text that the statistics lack, or one without tokens; sums that the metric needs.
        DataError: a text without a family, where there are any.
        UsageError: a ratio or metric that cannot be.
    """
    texts = tuple(dict.fromkeys(options.texts)) or tuple(statistics.entries)
    metric = options.metric or default_metric(statistics)
    families = groups_of(set(texts), options.families, "`families`") if options.families else {}
    values = {text: metric_values(metric, aggregate_texts(statistics, (text,)), statistics) for text in texts}
    axes = statistics.axes
    minimum = statistics.top_k if options.minimum is None else options.minimum
    budget = Budget(options.ratio, balance=Fraction(1), least=minimum)
    kept = {}
    for text in texts:
        try:
            kept[text] = select(axes, values[text], budget)
        except StatisticsError as error:
            raise StatisticsError(
                f"{text}: {error.message}", "Collect more of this text, or leave it out."
            ) from error
    chosen = [{(name, expert) for name, ids in kept[text].items() for expert in ids} for text in texts]
    vectors = {text: feature_vector([*values[text].values()]) for text in texts}
    model = Model(fingerprint=statistics.fingerprint, model_type=statistics.model_type)
    given: dict[str, Any] = {"families": families} if families else {}
    return Texts(
        **{**header(Texts.FORMAT, [], None), "models": [model]},
        statistics=list(files),
        metric=metric,
        ratio=options.ratio,
        linkage=options.linkage,
        texts=list(texts),
        **given,
        similarity=np.round(jaccard_matrix(chosen), 6).tolist(),
        clustering=cluster(vectors, options.linkage, "texts"),
        layers=[_layer(axis.module, {text: kept[text][axis.name] for text in texts}) for axis in axes],
    )


def _layer(name: str, kept: Mapping[str, Sequence[int]]) -> TextLayer:
    sets = {text: set(experts) for text, experts in kept.items()}
    counts = {expert: sum(expert in own for own in sets.values()) for expert in set().union(*sets.values())}
    above = jaccard_matrix([*sets.values()])[np.triu_indices(len(sets), 1)]
    return TextLayer(
        layer=name,
        kept=len(next(iter(kept.values()))),
        common=sorted(expert for expert, count in counts.items() if count == len(sets)),
        own={
            text: sorted(expert for expert in own if counts[expert] == 1 < len(sets))
            for text, own in sets.items()
        },
        jaccard=round(float(above.mean()), 6) if len(above) else None,
    )
