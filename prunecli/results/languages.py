"""languages.json and texts.json: shared experts, clusters of languages or texts by their experts (2212.09811, 6.2-6.3).

languages.json also has the experts that each layer keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, zip_longest

from pydantic import Field, model_validator

from prunecli.results.document import (
    Blocks,
    Count,
    Document,
    Json,
    Number,
    Record,
    Row,
    Shown,
    Tables,
    check_matrix,
    maybe,
)
from prunecli.tensors.quantities import counted

SIDES = ("encoder", "decoder")
TABLE_PAIRS = 12
"""With more pairs than this, their similarities are summed up, not listed."""


class Tree(Record):
    """A clustering of languages, or of texts.

    Attributes:
        languages, texts: the leaves; one of the two is given.
        order: the leaves side by side, as the tree lists them.
        clusters: nested: {"distance", "members": [leaf or cluster, …]}.
        matrix: scipy's linkage matrix, `[leaves - 1, 4]`.
    """

    languages: list[str] = []
    texts: list[str] = []
    order: list[str] = []
    clusters: Json = {}
    matrix: list[tuple[Number, Number, Number, Number]] = Field(min_length=1)

    @property
    def leaves(self) -> list[str]:
        """The leaves, as the matrix counts them."""
        return self.languages or self.texts

    @model_validator(mode="after")
    def _is_a_tree(self) -> Tree:
        leaves = len(self.leaves)
        joined = sorted(cluster for row in self.matrix for cluster in row[:2])
        in_order = all(max(row[:2]) < leaves + index for index, row in enumerate(self.matrix))
        # Every leaf and every cluster but the last one joins another one once.
        if joined != [*range(2 * leaves - 2)] or not in_order or min(row[2] for row in self.matrix) < 0:
            raise ValueError(f"the matrix joins no tree of {leaves} languages or texts")
        return self

    def blocks(self, title: str) -> Iterator[str]:
        """Yield a title and the tree as text; see `text_tree`."""
        yield title
        yield "\n".join(text_tree(self.clusters)) + "\n"

    def rows(self) -> Iterator[Row]:
        """Yield each two clusters that join, by the leaves in them."""
        members = [[leaf] for leaf in self.leaves]
        for first, second, distance, _ in self.matrix:
            one, other = members[int(first)], members[int(second)]
            yield {"first": " ".join(one), "second": " ".join(other), "distance": distance}
            members.append([*one, *other])


def text_tree(root: Json | str) -> Iterator[str]:
    """Yield nested clusters as lines of text; a number is the distance at which the branches below it join."""
    if isinstance(root, str):
        yield root
        return
    yield f"{root['distance']:.3f}"
    for member, (branch, below) in zip(root["members"], (("├─ ", "│  "), ("└─ ", "   ")), strict=True):
        first, *rest = text_tree(member)
        yield branch + first
        yield from (below + line for line in rest)


class Relation(Record):
    """Spread of the similarities of pairs."""

    comparisons: Count
    mean: Number
    lowest: Number
    highest: Number


class Similarities(Record):
    """Jaccard similarities of pairs.

    Attributes:
        relations: side -> what two pairs have in common -> their spread.
        encoder, decoder: `[pairs, pairs]`; None where there are too many pairs to list them.
    """

    relations: dict[str, dict[str, Relation | None]]
    encoder: list[list[Number]] | None = None
    decoder: list[list[Number]] | None = None


class Clustering(Record):
    """Trees by side."""

    linkage: str
    encoder: Tree | None = None
    decoder: Tree | None = None


class ExpertsByGroup(Record):
    """Mean number of experts that the sides keep for the pairs from one group of languages to another (Table 16)."""

    source: str
    target: str
    pairs: Count
    encoder: Number
    decoder: Number


class ExpertsPerLayer(Record):
    """Experts that each layer keeps under the global threshold, over the pairs; of a metric of their own, maybe."""

    strategy: str = ""
    metric: str | None = None
    layers: list[str] = Field(min_length=1)
    sides: list[str] = []
    mean: list[Number]
    lowest: list[Count]
    highest: list[Count]
    by_pair: dict[str, list[Count]] = {}
    by_group: list[ExpertsByGroup] = []

    @model_validator(mode="after")
    def _have_one_length(self) -> ExpertsPerLayer:
        if {len(self.mean), len(self.lowest), len(self.highest)} != {len(self.layers)}:
            raise ValueError("experts_per_layer: not a value for each layer")
        return self


class Languages(Document):
    """languages.json; a part that the statistics do not allow is None."""

    FORMAT = "prunecli.languages/1"

    statistics: list[str] = []
    metric: str
    ratio: Number
    strategy: str
    balance: str = ""
    mode: str = ""
    pairs: list[str]
    groups: dict[str, str] = {}
    families: dict[str, str] = {}
    similarity: Similarities | None = None
    clustering: Clustering
    experts_per_layer: ExpertsPerLayer | None = None

    @model_validator(mode="after")
    def _matrices_are_of_pairs(self) -> Languages:
        found = self.similarity or Similarities(relations={})
        for matrix in filter(None, (found.encoder, found.decoder)):
            check_matrix(matrix, self.pairs, self.pairs)
        return self

    @property
    def about(self) -> str:
        """See `Document`."""
        return (
            f"{counted(len(self.pairs), 'pair')}; {self.ratio:.0%} of the experts removed by "
            f"{self.metric}, {self.strategy}; clusters join by {self.clustering.linkage} linkage."
        )

    @property
    def shown(self) -> Iterator[Shown]:
        """Yield similarities by what pairs have in common, and the experts that each layer keeps."""
        rows = self._tables()
        relation = {
            "experts of the": "{side}",
            "pairs with": "{pairs_with}",
            "compared": "{compared:,}",
            "mean": "{jaccard_mean:.0%}",
            "range": "{jaccard_lowest:.0%} to {jaccard_highest:.0%}",
        }
        removed = f"{self.ratio:.0%} of the experts removed by {self.metric}, {self.strategy}"
        title = f"Jaccard similarity of the selected experts ({removed})"
        yield Shown.of(title, rows["relations"], relation, 2)
        if (kept := self.experts_per_layer) is not None:
            layers = rows["experts_per_layer"]
            sides = [
                {
                    "layer": f"{side}, all layers",
                    "experts_mean": sum(row["experts_mean"] for row in layers if row["side"] == side),
                }
                for side in dict.fromkeys(kept.sides)
            ]
            layer = {
                "layer": "{layer}",
                "experts": "{experts_mean:.1f}",
                "range": "{experts_lowest} to {experts_highest}",
            }
            by = f"({self.ratio:.0%} of the experts removed by {kept.metric}), mean over {len(self.pairs)} pairs"
            title = f"Experts per layer under the global threshold {by}"
            yield Shown.of(title, [*layers, *sides], layer)
            group = {
                "from": "{source}",
                "to": "{target}",
                "pairs": "{pairs}",
                "encoder": "{encoder:.1f}",
                "decoder": "{decoder:.1f}",
            }
            title = "The same by group of languages: experts of a side"
            yield Shown.of(title, rows["experts_by_group"], group, 2)

    @property
    def summed_up(self) -> tuple[str, ...]:
        """See `Document`."""
        return ("similarity",) if len(self.pairs) > TABLE_PAIRS else ()

    @property
    def blocks(self) -> Blocks:
        """Similarities, trees, and experts of each layer."""
        similarity, pairs, clusters = self.similarity, self.pairs, self.clustering
        first, *others = self.shown
        yield first
        if similarity is not None and self.summed_up:
            yield f"{len(pairs)} pairs; --langs A,B,C lists those between a few languages.\n"
        elif similarity is not None:
            # Table 4: the encoder below the diagonal, the decoder above.
            sides = similarity.encoder or [], similarity.decoder or []
            rows = [
                {
                    "pair": f"{row + 1} {pair}",
                    **{
                        str(column + 1): None
                        if row == column
                        else f"{100 * sides[column > row][row][column]:.0f}"
                        for column in range(len(pairs))
                    },
                }
                for row, pair in enumerate(pairs)
            ]
            yield Shown("Jaccard similarity in %, encoder below the diagonal and decoder above", rows)
        for side, tree in (("encoder by source", clusters.encoder), ("decoder by target", clusters.decoder)):
            if tree is not None:
                yield from tree.blocks(f"Clusters of languages, {side} ({clusters.linkage} linkage)")
        yield from others

    def _tables(self) -> Tables:
        """`relations`, `similarity` (each two pairs once), `clusters` (as they join), experts by layer and by group."""
        found = self.similarity or Similarities(relations={})
        tables = {
            "relations": [
                {
                    "side": side,
                    "pairs_with": relation,
                    "compared": spread.comparisons,
                    "jaccard_mean": spread.mean,
                    "jaccard_lowest": spread.lowest,
                    "jaccard_highest": spread.highest,
                }
                for side, relations in found.relations.items()
                for relation, spread in relations.items()
                if spread is not None
            ],
            "similarity": [],
            "clusters": [
                {"side": side, **row}
                for side in SIDES
                if (tree := getattr(self.clustering, side)) is not None
                for row in tree.rows()
            ],
        }
        if found.encoder is not None and found.decoder is not None:
            tables["similarity"] = [
                {
                    "first_pair": self.pairs[one],
                    "second_pair": self.pairs[other],
                    "encoder_jaccard": found.encoder[one][other],
                    "decoder_jaccard": found.decoder[one][other],
                }
                for one, other in combinations(range(len(self.pairs)), 2)
            ]
        if (kept := self.experts_per_layer) is not None:
            names = ("layer", "side", "experts_mean", "experts_lowest", "experts_highest")
            columns = (kept.layers, kept.sides, kept.mean, kept.lowest, kept.highest)
            tables["experts_per_layer"] = [
                dict(zip(names, values, strict=True)) for values in zip_longest(*columns)
            ]
            tables["experts_by_group"] = [group.to_json() for group in kept.by_group]
        return tables


class TextLayer(Record):
    """The experts that texts select in one layer.

    Attributes:
        kept: experts that each text selects.
        common: experts that all texts select.
        own: text -> experts that it alone selects, of several.
        jaccard: mean similarity of two texts; None of one.
    """

    layer: str
    kept: Count
    common: list[Count]
    own: dict[str, list[Count]]
    jaccard: Number | None = None


class Texts(Document):
    """texts.json.

    Attributes:
        similarity: `[texts, texts]`, Jaccard similarities of the experts that they select in all layers.
    """

    FORMAT = "prunecli.texts/1"

    statistics: list[str] = []
    metric: str
    ratio: Number
    linkage: str = ""
    texts: list[str] = Field(min_length=1)
    families: dict[str, str] = {}
    similarity: list[list[Number]]
    clustering: Tree | None = None
    layers: list[TextLayer]

    @model_validator(mode="after")
    def _matrix_is_of_texts(self) -> Texts:
        check_matrix(self.similarity, self.texts, self.texts)
        return self

    @property
    def about(self) -> str:
        """See `Document`."""
        return (
            f"{counted(len(self.texts), 'text')}; {self.ratio:.0%} of the experts removed by {self.metric}."
        )

    @property
    def shown(self) -> Iterator[Shown]:
        """Yield the experts of each layer that texts select."""
        rows = [
            {
                "layer": row.layer,
                "experts": str(row.kept),
                "all texts": str(len(row.common)),
                **{f"only {text}": str(len(row.own.get(text, []))) for text in self.texts},
                "similarity": maybe("{:.0%}", row.jaccard),
            }
            for row in self.layers
        ]
        yield Shown("Experts of each layer that texts select", rows)

    @property
    def blocks(self) -> Blocks:
        """Jaccard similarities, the tree, and experts by layer."""
        removed = f"{self.ratio:.0%} of the experts removed by {self.metric}"
        rows = [
            {
                "text": text,
                **{
                    other: None if other == text else f"{100 * value:.0f}"
                    for other, value in zip(self.texts, row, strict=True)
                },
            }
            for text, row in zip(self.texts, self.similarity, strict=True)
        ]
        yield Shown(f"Jaccard similarity of the selected experts in % ({removed})", rows)
        if self.clustering is not None:
            yield from self.clustering.blocks(f"Clusters of texts ({self.linkage} linkage)")
        yield from self.shown

    def _tables(self) -> Tables:
        """`similarity` (each two texts once), `clusters` (as they join), `layers`."""
        return {
            "similarity": [
                {"first": first, "second": second, "jaccard": self.similarity[one][other]}
                for (one, first), (other, second) in combinations(enumerate(self.texts), 2)
            ],
            "clusters": [] if self.clustering is None else [*self.clustering.rows()],
            "layers": [
                {
                    "layer": layer.layer,
                    "experts": layer.kept,
                    "common": len(layer.common),
                    **{f"own_{text}": len(layer.own.get(text, [])) for text in self.texts},
                    "jaccard_mean": layer.jaccard,
                }
                for layer in self.layers
            ],
        }
