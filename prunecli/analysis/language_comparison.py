"""`compare-languages`: compare the experts that language pairs or texts select, and importance vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.analysis.language_experts import (
    LinkageMethod,
    Pair,
    cluster,
    feature_vector,
    jaccard_matrix,
    spread_by_relation,
)
from prunecli.errors import StatisticsError
from prunecli.methods.experts.metrics import (
    aggregate,
    aggregate_texts,
    default_metric,
    metric_named,
    metric_values,
)
from prunecli.methods.experts.options import MIN_PER_LAYER, SCOPES, balance_text
from prunecli.methods.options import Strategy
from prunecli.results.document import Model, header
from prunecli.results.gates import ANY, GateStatistics, side_of, split_pair
from prunecli.results.languages import (
    Clustering,
    ExpertsByGroup,
    ExpertsPerLayer,
    Languages,
    Similarities,
    TextLayer,
    Texts,
    Tree,
)
from prunecli.selection.select import Budget, Kept, select
from prunecli.text.parallel import groups_of, read_groups

MOST_PAIRS = 1000
"""Of more pairs than this, languages.json has the similarities by what pairs share, without the matrices."""


@dataclass(frozen=True)
class LanguageOptions:
    """Options of `compare_by_language`.

    Attributes:
        ratio: fraction of the experts removed.
        metric: as in `prune-experts`.
        strategy: what selects the experts whose sets are compared.
        balance: encoder experts per decoder expert under that strategy (1 in section 6.2).
        minimum: experts that every layer keeps.
        linkage: how clusters join.
        languages: only pairs between these; empty: all.
        layer_metric: of the experts per layer (Figure 1: top1); None: `metric`.
        groups: language -> group, such as resource classes, for experts per side by group (Table 16); empty: none.
        families: language -> family, for the colours of the trees; empty: none.
    """

    ratio: float = 0.75
    metric: str = "importance"
    strategy: Strategy = "side-threshold"
    balance: Fraction = Fraction(1)
    minimum: int = MIN_PER_LAYER
    linkage: LinkageMethod = "ward"
    languages: tuple[str, ...] = ()
    layer_metric: str | None = None
    groups: Mapping[str, str] = field(default_factory=dict)
    families: Mapping[str, str] = field(default_factory=dict)


def language_options(
    ratio: float,
    metric: str | None,
    strategy: Strategy | None,
    balance: Fraction | None,
    minimum: int | None,
    linkage: LinkageMethod,
    languages: tuple[str, ...],
    layer_metric: str | None = None,
    groups: Path | None = None,
    families: Path | None = None,
) -> LanguageOptions:
    """Options from the values of a command line; None: the default.

    Raises:
        UsageError: an unknown strategy, metric or balance.
        DataError: an invalid file of groups or families.
    """
    default = LanguageOptions()
    strategy = default.strategy if strategy is None else strategy
    for name in filter(None, (metric, layer_metric)):
        metric_named(name)
    return LanguageOptions(
        layer_metric=layer_metric,
        groups={} if groups is None else read_groups(groups),
        families={} if families is None else read_groups(families),
        ratio=ratio,
        metric=default.metric if metric is None else metric,
        strategy=strategy,
        balance=default.balance if balance is None else balance,
        minimum=default.minimum if minimum is None else minimum,
        linkage=linkage,
        languages=languages,
    )


def compare_by_language(
    statistics: GateStatistics, options: LanguageOptions, files: Sequence[str] = ()
) -> Languages:
    """languages.json; `files` are names of the statistics.

    - similarity: Jaccard similarity of the experts that the pairs select, by side (6.2, Table 4).
    - clustering: languages by their importance vectors: encoder by source, decoder by target (6.3).
    - experts_per_layer: what the global threshold keeps for each pair (Figure 1).

    A part that the statistics do not allow is None.

    Raises:
        StatisticsError: no language is left, or a layer has no tokens.
        DataError: a language without a group or a family, where there are any.
        UsageError: a ratio, metric or strategy that cannot be.
    """
    names = [pair for pair in statistics.entries if ANY not in split_pair(pair)]
    chosen = set(options.languages)
    pairs = [pair for pair in names if not chosen or chosen >= set(split_pair(pair))]
    if names and not pairs:
        raise StatisticsError(
            f"The statistics hold no pair between {', '.join(options.languages)}.",
            f"They hold {names[0]}, for one.",
        )
    languages = {language for pair in statistics.entries for language in split_pair(pair)} - {ANY}
    languages &= set(options.languages or languages)
    if options.groups:
        options = replace(options, groups=groups_of(languages, options.groups, "`groups`"))
    families = groups_of(languages, options.families, "`families`") if options.families else {}
    given: dict[str, Any] = {
        name: value for name, value in (("groups", options.groups), ("families", families)) if value
    }
    model = Model(fingerprint=statistics.fingerprint, model_type=statistics.model_type)
    return Languages(
        **{**header(Languages.FORMAT, [], None), "models": [model]},
        statistics=list(files),
        metric=options.metric,
        ratio=options.ratio,
        strategy=options.strategy,
        balance=balance_text(options.balance),
        mode=statistics.mode,
        pairs=pairs,
        **given,
        similarity=_similarity(statistics, options, pairs) if pairs else None,
        clustering=Clustering(
            linkage=options.linkage,
            encoder=_tree(statistics, options, "encoder"),
            decoder=_tree(statistics, options, "decoder"),
        ),
        experts_per_layer=_experts_per_layer(statistics, options, pairs) if pairs else None,
    )


def _select(
    statistics: GateStatistics,
    options: LanguageOptions,
    pairs: Sequence[str],
    strategy: Strategy,
    metric: str,
) -> list[Kept]:
    """The experts that each pair keeps."""
    axes = statistics.axes
    budget = Budget(
        options.ratio,
        scope=SCOPES[strategy],
        balance=options.balance,
        least=options.minimum,
        released=statistics.mode == "published",
    )
    return [
        select(axes, metric_values(metric, statistics.entries[pair], statistics), budget) for pair in pairs
    ]


def similarity_matrices(
    statistics: GateStatistics, options: LanguageOptions, pairs: Sequence[str]
) -> dict[str, NDArray[np.float64]]:
    """Side -> Jaccard similarities of the experts that the pairs select there, [len(pairs), len(pairs)]."""
    selections = _select(statistics, options, pairs, options.strategy, options.metric)
    matrices = {}
    for side in ("encoder", "decoder"):
        chosen = [
            {(name, expert) for name, ids in kept.items() if side_of(name) == side for expert in ids}
            for kept in selections
        ]
        matrices[side] = jaccard_matrix(chosen)
    return matrices


def _similarity(statistics: GateStatistics, options: LanguageOptions, pairs: Sequence[str]) -> Similarities:
    matrices = similarity_matrices(statistics, options, pairs)
    split: list[Pair] = [split_pair(pair) for pair in pairs]
    relations = {side: spread_by_relation(split, matrix) for side, matrix in matrices.items()}
    if len(pairs) > MOST_PAIRS:
        return Similarities(relations=relations)
    listed = {side: np.round(matrix, 6).tolist() for side, matrix in matrices.items()}
    return Similarities(relations=relations, **listed)


def _tree(statistics: GateStatistics, options: LanguageOptions, side: str) -> Tree | None:
    """Cluster languages by their metric values in the layers of one side: encoder by source, decoder by target."""
    position = 0 if side == "encoder" else 1
    names = {split_pair(pair)[position] for pair in statistics.entries} - {ANY}
    vectors = {}
    for name in sorted(names & set(options.languages or names)):
        chosen = ((name,), ()) if side == "encoder" else ((), (name,))
        values = metric_values(options.metric, aggregate(statistics, "language", *chosen), statistics)
        vectors[name] = feature_vector([own for name, own in values.items() if side_of(name) == side])
    return cluster(vectors, options.linkage) if any(map(len, vectors.values())) else None


def _experts_per_layer(
    statistics: GateStatistics, options: LanguageOptions, pairs: Sequence[str]
) -> ExpertsPerLayer:
    metric = options.layer_metric or options.metric
    selections = _select(statistics, options, pairs, "global-threshold", metric)
    counts = np.array([[len(ids) for ids in kept.values()] for kept in selections])
    return ExpertsPerLayer(
        strategy="global-threshold",
        metric=metric,
        layers=list(statistics.layers),
        sides=[side_of(layer) for layer in statistics.layers],
        mean=np.round(counts.mean(axis=0), 4).tolist(),
        lowest=counts.min(axis=0).tolist(),
        highest=counts.max(axis=0).tolist(),
        by_pair={pair: row.tolist() for pair, row in zip(pairs, counts, strict=True)},
        **_by_group(statistics.layers, options.groups, pairs, counts),
    )


def _by_group(
    layers: Sequence[str], groups: Mapping[str, str], pairs: Sequence[str], counts: NDArray[np.int64]
) -> dict[str, list[ExpertsByGroup]]:
    """`by_group`: means over the pairs of each two groups, in the groups' order; `counts` are `[pairs, layers]`."""
    if not groups:
        return {}
    import pandas as pd

    order = list(dict.fromkeys(groups.values()))
    ends = [tuple(order.index(groups[language]) for language in split_pair(pair)) for pair in pairs]
    sides = np.array([side_of(layer) for layer in layers])
    held = pd.DataFrame({side: counts[:, sides == side].sum(axis=1) for side in ("encoder", "decoder")})
    grouped = held.groupby([list(side) for side in zip(*ends, strict=True)])
    return {
        "by_group": [
            ExpertsByGroup(
                source=order[source],
                target=order[target],
                pairs=len(rows),
                encoder=round(float(rows["encoder"].mean()), 4),
                decoder=round(float(rows["decoder"].mean()), 4),
            )
            for (source, target), rows in grouped
        ]
    }


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
