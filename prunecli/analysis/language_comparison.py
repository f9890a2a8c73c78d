"""`compare-languages`: compare the experts that language pairs or texts select, and importance vectors."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.cluster import hierarchy

from prunecli.errors import StatisticsError
from prunecli.methods.experts.metrics import aggregate, default_metric, measure_texts, metric_values
from prunecli.methods.experts.options import MIN_PER_LAYER, SCOPES, balance_text
from prunecli.methods.options import LanguageOptions, Strategy
from prunecli.model.axes import Axis
from prunecli.model.decision import Bools, Floats
from prunecli.results.document import Json, Model
from prunecli.results.gates import ANY, GateStatistics, side_of, split_pair
from prunecli.results.languages import (
    SIDES,
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


def compare_by_language(
    statistics: GateStatistics, options: LanguageOptions, files: Sequence[str]
) -> Languages:
    """languages.json; `files` are names of the statistics. Defaults of the options are those of 2212.09811, 6.2.

    - similarity: Jaccard similarity of the experts that the pairs select, by side (6.2, Table 4).
    - clustering: languages by their importance vectors: encoder by source, decoder by target (6.3).
    - experts_per_layer: what the global threshold keeps for each pair (Figure 1).

    A part that the statistics do not allow is None.

    Raises:
        StatisticsError: no language is left, or a layer has no tokens.
        DataError: a language without a group or a family, where there are any.
        UsageError: a ratio, metric or strategy that cannot be.
    """
    metric, strategy = options.metric or "importance", options.strategy or "side-threshold"
    layer_metric = options.layer_metric or metric
    names = [pair for pair in statistics.entries if ANY not in split_pair(pair)]
    languages = {language for pair in statistics.entries for language in split_pair(pair)} - {ANY}
    languages &= set(options.langs or languages)
    pairs = [pair for pair in names if languages.issuperset(split_pair(pair))]
    if names and not pairs:
        raise StatisticsError(
            f"The statistics hold no pair between {', '.join(options.langs)}.",
            f"They hold {names[0]}, for one.",
        )
    about = _about(Languages, statistics, files, options, languages)
    similarity = layers = None

    def kept_by(strategy: Strategy, metric: str) -> list[Kept]:
        """The experts that each pair keeps."""
        budget = Budget(
            options.ratio,
            scope=SCOPES[strategy],
            balance=options.balance or Fraction(1),
            least=MIN_PER_LAYER if options.least is None else options.least,
            released=statistics.mode == "published",
        )
        values = (metric_values(metric, statistics.entries[pair], statistics) for pair in pairs)
        return [select(statistics.axes, own, budget)[0] for own in values]

    if pairs:
        kept, relations, listed = kept_by(strategy, metric), {}, {}
        for side in SIDES:
            axes = [axis for axis in statistics.axes if axis.side == side]
            matrix = jaccard_matrix(_selected(axes, kept))
            relations[side] = spread_by_relation([split_pair(pair) for pair in pairs], matrix)
            if len(pairs) <= MOST_PAIRS:
                listed[side] = np.round(matrix, 6).tolist()
        similarity = Similarities(relations=relations, **listed)
        kept = kept_by("global-threshold", layer_metric)
        layers = _experts_per_layer(statistics, kept, pairs, about.get("groups", {}), layer_metric)
    return Languages(
        **about,
        metric=metric,
        strategy=strategy,
        balance=balance_text(options.balance or Fraction(1)),
        mode=statistics.mode,
        pairs=pairs,
        similarity=similarity,
        clustering=Clustering(
            linkage=options.linkage,
            **{side: _tree(statistics, options, metric, side) for side in SIDES},
        ),
        experts_per_layer=layers,
    )


def _about(
    kind: type[Languages | Texts],
    statistics: GateStatistics,
    files: Sequence[str],
    options: LanguageOptions,
    members: set[str],
) -> Json:
    """The fields that languages.json and texts.json share; `members` are the languages or texts."""
    classes = {
        name: groups_of(members, read_groups(path), f"`{name}`")
        for name in ("groups", "families")
        if name in kind.model_fields and (path := getattr(options, name)) is not None
    }
    return {
        **kind.header([]),
        "models": [Model(fingerprint=statistics.fingerprint, model_type=statistics.model_type)],
        "statistics": list(files),
        "ratio": options.ratio,
        **{name: found for name, found in classes.items() if found},
    }


def _selected(axes: Sequence[Axis], kept: Sequence[Kept]) -> Bools:
    """`[pairs or texts, experts of all axes]`: whether an expert is selected."""
    return np.array([np.concatenate([np.isin(axis.ids, own[axis.name]) for axis in axes]) for own in kept])


def _tree(statistics: GateStatistics, options: LanguageOptions, metric: str, side: str) -> Tree | None:
    """Cluster languages by their metric values in the layers of one side: encoder by source, decoder by target."""
    position = 0 if side == "encoder" else 1
    names = {split_pair(pair)[position] for pair in statistics.entries} - {ANY}
    vectors = {}
    for name in sorted(names & set(options.langs or names)):
        chosen = ((name,), ()) if side == "encoder" else ((), (name,))
        values = metric_values(metric, aggregate(statistics, "language", *chosen), statistics)
        vectors[name] = feature_vector([own for name, own in values.items() if side_of(name) == side])
    return cluster(vectors, options.linkage)


def _experts_per_layer(
    statistics: GateStatistics,
    kept: Sequence[Kept],
    pairs: Sequence[str],
    groups: Mapping[str, str],
    metric: str,
) -> ExpertsPerLayer:
    """The experts that each layer keeps for the pairs; `groups`: language -> group."""
    counts, layers = np.array([[len(ids) for ids in own.values()] for own in kept]), statistics.layers
    sides: list[str] = [side_of(layer) for layer in layers]
    found: Json = {}
    if groups:
        order = [*dict.fromkeys(groups.values())]
        sums = {side: counts[:, np.array(sides) == side].sum(axis=1) for side in SIDES}
        for end, name in enumerate(("source", "target")):
            sums[name] = pd.Categorical([groups[split_pair(pair)[end]] for pair in pairs], order)
        grouped = pd.DataFrame(sums).groupby(["source", "target"], observed=True)
        rows = grouped.mean().round(4).assign(pairs=grouped.size()).reset_index()
        found["by_group"] = [ExpertsByGroup(**row) for row in rows.to_dict("records")]
    return ExpertsPerLayer(
        strategy="global-threshold",
        metric=metric,
        layers=list(layers),
        sides=sides,
        mean=np.round(counts.mean(axis=0), 4).tolist(),
        lowest=counts.min(axis=0).tolist(),
        highest=counts.max(axis=0).tolist(),
        by_pair=dict(zip(pairs, counts.tolist(), strict=True)),
        **found,
    )


def compare_by_text(statistics: GateStatistics, options: LanguageOptions, files: Sequence[str]) -> Texts:
    """texts.json; `files` are names of the statistics.

    Raises:
        StatisticsError: a text that the statistics lack, or one without tokens; sums that the metric needs.
        DataError: a text without a family, where there are any.
        UsageError: a ratio or metric that cannot be.
    """
    texts = [*dict.fromkeys(options.texts or statistics.entries)]
    metric, axes = options.metric or default_metric(statistics), statistics.axes
    about = _about(Texts, statistics, files, options, set(texts))
    values = {
        text: metric_values(metric, measure_texts(statistics, (text,)).sums, statistics) for text in texts
    }
    groups, least = statistics.groups, options.least or statistics.top_k
    budget = Budget(options.ratio, balance=Fraction(1), least=least, multiple=groups, groups=groups)
    kept = []
    for text in texts:
        try:
            kept.append(select(axes, values[text], budget)[0])
        except StatisticsError as error:
            raise StatisticsError(
                f"{text}: {error.message}", "Collect more of this text, or leave it out."
            ) from error
    vectors = {text: feature_vector([*values[text].values()]) for text in texts}
    return Texts(
        **about,
        metric=metric,
        linkage=options.linkage,
        texts=texts,
        similarity=np.round(jaccard_matrix(_selected(axes, kept)), 6).tolist(),
        clustering=cluster(vectors, options.linkage, "texts"),
        layers=[_layer(axis, texts, _selected([axis], kept)) for axis in axes],
    )


def _layer(axis: Axis, texts: Sequence[str], selected: Bools) -> TextLayer:
    """The experts of one layer by the texts that select them; `selected` is `[texts, experts]`."""
    experts, counts = np.array(axis.ids), selected.sum(axis=0)
    alone = (counts == 1) & (len(texts) > 1)
    above = jaccard_matrix(selected)[np.triu_indices(len(texts), 1)]
    return TextLayer(
        layer=axis.module,
        kept=selected[0].sum(),
        common=experts[counts == len(texts)].tolist(),
        own={text: experts[own & alone].tolist() for text, own in zip(texts, selected, strict=True)},
        jaccard=round(float(above.mean()), 6) if len(above) else None,
    )


def jaccard_matrix(selected: Bools) -> Floats:
    """|A ∩ B| / |A ∪ B| of each two rows of `[sets, members]`: `[sets, sets]`, symmetric; 1 for two empty sets."""
    holds = selected.astype(np.float32)  # counts below 2^24 are exact in it
    both = (holds @ holds.T).astype(np.float64)
    sizes = both.diagonal()
    either = np.add.outer(sizes, sizes) - both
    matrix: Floats = np.divide(both, either, out=np.ones_like(both), where=either > 0)
    return matrix


RELATIONS = ("same source", "same target", "neither")
"""What two different pairs have in common."""


def spread_by_relation(pairs: Sequence[tuple[str, str]], matrix: Floats) -> dict[str, Relation | None]:
    """Mean, lowest and highest similarity of the pairs with a common source, a common target, or neither.

    A relation that no two pairs have is None. Values are rounded to 6 digits.

    Args:
        pairs: (source, target), all different.
        matrix: Jaccard similarities [len(pairs), len(pairs)].
    """
    source, target = (np.equal.outer(names, names) for names in np.array(pairs).T)
    found: dict[str, Relation | None] = {}
    for relation, holds in zip(RELATIONS, (source, target, ~source & ~target), strict=True):
        values = matrix[np.triu(holds, 1)]  # each two pairs once
        found[relation] = None
        if len(values):
            mean, lowest, highest = (round(float(f(values)), 6) for f in (np.mean, np.min, np.max))
            found[relation] = Relation(comparisons=len(values), mean=mean, lowest=lowest, highest=highest)
    return found


def feature_vector(values: Sequence[Floats]) -> Floats:
    """Concatenated metric values `[layers * experts]` of sparse layers, each layer normalised to sum 1.

    A layer without any token stays zero.
    """
    return np.concatenate([layer / (layer.sum() or 1) for layer in values])


def cluster(
    vectors: Mapping[str, Floats],
    method: str = "ward",
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
    nodes: list[tuple[float, Any, list[str]]] = [(np.inf, name, [name]) for name in vectors]
    for first, second, distance, _ in matrix.tolist():
        # The tighter cluster comes first, single leaves last.
        one, other = sorted((nodes[int(first)], nodes[int(second)]), key=itemgetter(0))
        joined = {"distance": distance, "members": [one[1], other[1]]}
        nodes.append((distance, joined, one[2] + other[2]))
    _, clusters, order = nodes[-1]
    return Tree(**{kind: list(vectors)}, order=order, clusters=clusters, matrix=matrix.tolist())
