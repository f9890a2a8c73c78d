"""`compare-languages`: compare the experts that language pairs or texts select, and importance vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from fractions import Fraction
from itertools import product
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.cluster import hierarchy

from prunecli.errors import StatisticsError
from prunecli.methods.experts.metrics import (
    aggregate,
    aggregate_texts,
    default_metric,
    metric_named,
    metric_values,
)
from prunecli.methods.experts.options import MIN_PER_LAYER, SCOPES, balance_text
from prunecli.methods.options import LanguageOptions, Strategy
from prunecli.results.document import Model, header
from prunecli.results.gates import ANY, GateStatistics, side_of, split_pair
from prunecli.results.languages import (
    Clustering,
    ExpertsByGroup,
    ExpertsPerLayer,
    Languages,
    Relation,
    Similarities,
    TextLayer,
    Texts,
    Tree,
)
from prunecli.selection.select import Budget, Kept, select
from prunecli.text.parallel import groups_of, read_groups

MOST_PAIRS = 1000
"""Of more pairs than this, languages.json has the similarities by what pairs share, without the matrices."""


def _for_languages(options: LanguageOptions) -> LanguageOptions:
    """Return the options with the values that None stands for (2212.09811, section 6.2).

    Raises:
        UsageError: an unknown metric.
    """
    for name in filter(None, (options.metric, options.layer_metric)):
        metric_named(name)
    metric = options.metric or "importance"
    defaults: dict[str, Any] = {
        "metric": metric,
        "layer_metric": metric,
        "strategy": "side-threshold",
        "balance": Fraction(1),
        "least": MIN_PER_LAYER,
    }
    missing = {name: value for name, value in defaults.items() if getattr(options, name) is None}
    return options.model_copy(update=missing)


def compare_by_language(
    statistics: GateStatistics, options: LanguageOptions | None = None, files: Sequence[str] = ()
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
    options = _for_languages(options or LanguageOptions())
    names = [pair for pair in statistics.entries if ANY not in split_pair(pair)]
    chosen = set(options.langs)
    pairs = [pair for pair in names if not chosen or chosen >= set(split_pair(pair))]
    if names and not pairs:
        raise StatisticsError(
            f"The statistics hold no pair between {', '.join(options.langs)}.",
            f"They hold {names[0]}, for one.",
        )
    languages = {language for pair in statistics.entries for language in split_pair(pair)} - {ANY}
    languages &= set(options.langs or languages)
    groups, families = (
        {} if path is None else groups_of(languages, read_groups(path), f"`{name}`")
        for name, path in (("groups", options.groups), ("families", options.families))
    )
    given: dict[str, Any] = {
        name: value for name, value in (("groups", groups), ("families", families)) if value
    }
    model = Model(fingerprint=statistics.fingerprint, model_type=statistics.model_type)
    return Languages(
        **{**header(Languages.FORMAT, [], None), "models": [model]},
        statistics=list(files),
        metric=str(options.metric),
        ratio=options.ratio,
        strategy=str(options.strategy),
        balance=balance_text(options.balance or Fraction(1)),
        mode=statistics.mode,
        pairs=pairs,
        **given,
        similarity=_similarity(statistics, options, pairs) if pairs else None,
        clustering=Clustering(
            linkage=options.linkage,
            encoder=_tree(statistics, options, "encoder"),
            decoder=_tree(statistics, options, "decoder"),
        ),
        experts_per_layer=_experts_per_layer(statistics, options, pairs, groups) if pairs else None,
    )


def _select(
    statistics: GateStatistics,
    options: LanguageOptions,
    pairs: Sequence[str],
    strategy: Strategy | None,
    metric: str | None,
) -> list[Kept]:
    """The experts that each pair keeps."""
    budget = Budget(
        options.ratio,
        scope=SCOPES[strategy or "side-threshold"],
        balance=options.balance,
        least=options.least or 0,
        released=statistics.mode == "published",
    )
    values = (metric_values(str(metric), statistics.entries[pair], statistics) for pair in pairs)
    return [select(statistics.axes, own, budget) for own in values]


def _similarity(statistics: GateStatistics, options: LanguageOptions, pairs: Sequence[str]) -> Similarities:
    """Jaccard similarities of the experts that the pairs select, by side; without matrices for many pairs."""
    selections = _select(statistics, options, pairs, options.strategy, options.metric)
    relations, listed = {}, {}
    for side in ("encoder", "decoder"):
        chosen = [
            {(name, expert) for name, ids in kept.items() if side_of(name) == side for expert in ids}
            for kept in selections
        ]
        matrix = jaccard_matrix(chosen)
        relations[side] = spread_by_relation([split_pair(pair) for pair in pairs], matrix)
        if len(pairs) <= MOST_PAIRS:
            listed[side] = np.round(matrix, 6).tolist()
    return Similarities(relations=relations, **listed)


def _tree(statistics: GateStatistics, options: LanguageOptions, side: str) -> Tree | None:
    """Cluster languages by their metric values in the layers of one side: encoder by source, decoder by target."""
    position = 0 if side == "encoder" else 1
    names = {split_pair(pair)[position] for pair in statistics.entries} - {ANY}
    vectors = {}
    for name in sorted(names & set(options.langs or names)):
        chosen = ((name,), ()) if side == "encoder" else ((), (name,))
        values = metric_values(str(options.metric), aggregate(statistics, "language", *chosen), statistics)
        vectors[name] = feature_vector([own for name, own in values.items() if side_of(name) == side])
    return cluster(vectors, options.linkage) if any(map(len, vectors.values())) else None


def _experts_per_layer(
    statistics: GateStatistics, options: LanguageOptions, pairs: Sequence[str], groups: Mapping[str, str]
) -> ExpertsPerLayer:
    selections = _select(statistics, options, pairs, "global-threshold", options.layer_metric)
    counts = np.array([[len(ids) for ids in kept.values()] for kept in selections])
    return ExpertsPerLayer(
        strategy="global-threshold",
        metric=options.layer_metric,
        layers=list(statistics.layers),
        sides=[side_of(layer) for layer in statistics.layers],
        mean=np.round(counts.mean(axis=0), 4).tolist(),
        lowest=counts.min(axis=0).tolist(),
        highest=counts.max(axis=0).tolist(),
        by_pair={pair: row.tolist() for pair, row in zip(pairs, counts, strict=True)},
        **_by_group(statistics.layers, groups, pairs, counts),
    )


def _by_group(
    layers: Sequence[str], groups: Mapping[str, str], pairs: Sequence[str], counts: NDArray[np.int64]
) -> dict[str, list[ExpertsByGroup]]:
    """`by_group`: means over the pairs of each two groups, in the groups' order; `counts` are `[pairs, layers]`."""
    if not groups:
        return {}
    sides = np.array([side_of(layer) for layer in layers])
    ends = [tuple(groups[language] for language in split_pair(pair)) for pair in pairs]
    found = []
    for source, target in product(dict.fromkeys(groups.values()), repeat=2):
        rows = counts[[end == (source, target) for end in ends]]
        if len(rows):
            encoder, decoder = (
                round(float(rows[:, sides == side].sum(axis=1).mean()), 4) for side in ("encoder", "decoder")
            )
            found.append(
                ExpertsByGroup(
                    source=source, target=target, pairs=len(rows), encoder=encoder, decoder=decoder
                )
            )
    return {"by_group": found}


def compare_by_text(
    statistics: GateStatistics, options: LanguageOptions | None = None, files: Sequence[str] = ()
) -> Texts:
    """texts.json; `files` are names of the statistics.

    Raises:
        StatisticsError: a text that the statistics lack, or one without tokens; sums that the metric needs.
        DataError: a text without a family, where there are any.
        UsageError: a ratio or metric that cannot be.
    """
    options = options or LanguageOptions()
    texts = tuple(dict.fromkeys(options.texts)) or tuple(statistics.entries)
    metric = options.metric or default_metric(statistics)
    path = options.families
    families = {} if path is None else groups_of(set(texts), read_groups(path), "`families`")
    values = {text: metric_values(metric, aggregate_texts(statistics, (text,)), statistics) for text in texts}
    axes = statistics.axes
    budget = Budget(options.ratio, balance=Fraction(1), least=options.least or statistics.top_k)
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


Pair = tuple[str, str]
Node: TypeAlias = Mapping[str, Any] | str
"""A cluster, {"distance", "members": [node, node]}, or the name of a leaf."""
LinkageMethod = Literal["ward", "average", "complete", "single"]


def jaccard_matrix(selections: Sequence[Set[Any]]) -> NDArray[np.float64]:
    """|A ∩ B| / |A ∪ B| of all pairs of sets: [len(selections), len(selections)], symmetric; 1 for two empty sets."""
    members = {
        member: column for column, member in enumerate(dict.fromkeys(m for s in selections for m in s))
    }
    holds = np.zeros((len(selections), max(len(members), 1)), np.float32)  # counts below 2^24 are exact in it
    for row, selection in enumerate(selections):
        holds[row, [members[member] for member in selection]] = 1
    both = (holds @ holds.T).astype(np.float64)
    sizes = both.diagonal()
    either = sizes[:, None] + sizes[None, :] - both
    matrix: NDArray[np.float64] = np.divide(both, either, out=np.ones_like(both), where=either > 0)
    return matrix


RELATIONS = ("same source", "same target", "neither")
"""What two different pairs have in common."""


def spread_by_relation(pairs: Sequence[Pair], matrix: NDArray[np.float64]) -> dict[str, Relation | None]:
    """Mean, lowest and highest similarity of the pairs with a common source, a common target, or neither.

    A relation that no two pairs have is None. Values are rounded to 6 digits.

    Args:
        pairs: (source, target), all different.
        matrix: Jaccard similarities [len(pairs), len(pairs)].
    """
    names = np.array(pairs, dtype=str).reshape(-1, 2)
    source, target = (names[:, None, side] == names[None, :, side] for side in (0, 1))
    above = np.triu(np.ones(matrix.shape, bool), 1)  # each two pairs once
    found: dict[str, Relation | None] = {}
    for relation, holds in zip(RELATIONS, (source, target, ~source & ~target), strict=True):
        values = matrix[above & holds]
        found[relation] = None
        if len(values):
            mean, lowest, highest = (round(float(f(values)), 6) for f in (np.mean, np.min, np.max))
            found[relation] = Relation(comparisons=len(values), mean=mean, lowest=lowest, highest=highest)
    return found


def feature_vector(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Concatenated metric values `[layers * experts]` of sparse layers, each layer normalised to sum 1.

    A layer without any token stays zero.
    """
    parts = [np.asarray(layer, dtype=np.float64) for layer in values]
    return np.concatenate([layer / total if (total := layer.sum()) > 0 else layer for layer in parts])


def cluster(
    vectors: Mapping[str, NDArray[np.float64]],
    method: LinkageMethod = "ward",
    kind: Literal["languages", "texts"] = "languages",
) -> Tree | None:
    """Hierarchical clustering by Euclidean distance; None for fewer than two vectors.

    Args:
        vectors: language or text -> feature vector `[layers * experts]`, all of one length (`feature_vector`).
        method: how the distance of two clusters follows from that of their members.
        kind: the field of the result that names the leaves.
    """
    if len(vectors) < 2:
        return None
    matrix = hierarchy.linkage(np.stack(list(vectors.values())), method=method)
    nodes: list[Any] = list(vectors)
    for first, second, distance, _ in matrix:
        # The tighter cluster comes first, single leaves last.
        members = sorted(
            (nodes[int(first)], nodes[int(second)]),
            key=lambda node: np.inf if isinstance(node, str) else node["distance"],
        )
        nodes.append({"distance": float(distance), "members": members})
    order = leaves(nodes[-1])
    return Tree(**{kind: list(vectors)}, order=order, clusters=nodes[-1], matrix=matrix.tolist())


def leaves(node: Node) -> list[str]:
    """The leaves below a node, in the tree's order."""
    return (
        [node] if isinstance(node, str) else [leaf for member in node["members"] for leaf in leaves(member)]
    )
