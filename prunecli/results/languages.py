"""languages.json: shared experts, clusters of languages, experts that each layer keeps (2212.09811, 6.2 and 6.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, ClassVar

from pydantic import Field, model_validator

from prunecli.results.document import Count, Document, Number, Record
from prunecli.results.tabled import Row, Tables

SIDES = ("encoder", "decoder")


def check_linkage(leaves: int, matrix: Sequence[Sequence[float]]) -> None:
    """Refuse a linkage matrix `[leaves - 1, 4]` that joins no tree.

    Raises:
        ValueError: what is wrong.
    """
    merged = [cluster for row in matrix for cluster in row[:2]]
    in_order = all(
        0 <= cluster < leaves + index and float(cluster).is_integer()
        for index, row in enumerate(matrix)
        for cluster in row[:2]
    )
    if len(matrix) != leaves - 1 or not in_order or len(set(merged)) != len(merged):
        raise ValueError("the matrix joins no tree of its leaves")
    if any(row[2] < 0 for row in matrix):
        raise ValueError("a negative distance")


def joined(leaves: Sequence[str], matrix: Sequence[Sequence[float]]) -> list[Row]:
    """Each two clusters that join, by the leaves in them."""
    members = [[leaf] for leaf in leaves]
    rows: list[Row] = []
    for first, second, distance, _ in matrix:
        one, other = members[int(first)], members[int(second)]
        rows.append({"first": " ".join(one), "second": " ".join(other), "distance": distance})
        members.append([*one, *other])
    return rows


class Tree(Record):
    """The clustering of languages on one side.

    Attributes:
        order: the leaves side by side, as the tree lists them.
        clusters: nested: {"distance", "members": [language or cluster, …]}.
        matrix: scipy's linkage matrix, `[languages - 1, 4]`.
    """

    languages: list[str] = Field(min_length=2)
    order: list[str] = Field(default_factory=list)
    clusters: dict[str, Any] = Field(default_factory=dict)
    matrix: list[tuple[Number, Number, Number, Number]]

    @model_validator(mode="after")
    def _is_a_tree(self) -> Tree:
        check_linkage(len(self.languages), self.matrix)
        return self


class Relation(Record):
    """How alike the experts of pairs are."""

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
    sides: list[str] = Field(default_factory=list)
    mean: list[Number]
    lowest: list[Count]
    highest: list[Count]
    by_pair: dict[str, list[Count]] = Field(default_factory=dict)
    by_group: list[ExpertsByGroup] = Field(default_factory=list)

    @model_validator(mode="after")
    def _of_one_length(self) -> ExpertsPerLayer:
        if {len(self.mean), len(self.lowest), len(self.highest)} != {len(self.layers)}:
            raise ValueError("experts_per_layer: not a value for each layer")
        return self


class Languages(Document):
    """languages.json; a part that the statistics do not allow is None."""

    FORMAT: ClassVar[str] = "prunecli.languages/1"

    statistics: list[str] = Field(default_factory=list)
    metric: str
    ratio: Number
    strategy: str
    balance: str = ""
    mode: str = ""
    pairs: list[str]
    groups: dict[str, str] = Field(default_factory=dict)
    families: dict[str, str] = Field(default_factory=dict)
    similarity: Similarities | None = None
    clustering: Clustering
    experts_per_layer: ExpertsPerLayer | None = None

    @model_validator(mode="after")
    def _matrices_of_pairs(self) -> Languages:
        if self.similarity is not None:
            for side in (self.similarity.encoder, self.similarity.decoder):
                if side is not None and {len(side), *map(len, side)} != {len(self.pairs)}:
                    raise ValueError("similarity: not a row and a column for each pair")
        return self

    def _tables(self) -> Tables:
        """`relations`, `similarity` (each two pairs once), `clusters` (as they join), experts by layer and by group."""
        similarity, layers = self.similarity, self.experts_per_layer
        names = ("layer", "side", "experts_mean", "experts_lowest", "experts_highest")
        return {
            "relations": [
                {
                    "side": side,
                    "pairs_with": relation,
                    "compared": spread.comparisons,
                    "jaccard_mean": spread.mean,
                    "jaccard_lowest": spread.lowest,
                    "jaccard_highest": spread.highest,
                }
                for side, relations in ({} if similarity is None else similarity.relations).items()
                for relation, spread in relations.items()
                if spread is not None
            ],
            "similarity": [] if similarity is None else _similarity(self.pairs, similarity),
            "clusters": [
                {"side": side, **row}
                for side in SIDES
                if (tree := getattr(self.clustering, side)) is not None
                for row in joined(tree.languages, tree.matrix)
            ],
            "experts_per_layer": []
            if layers is None
            else [
                dict(zip(names, values, strict=True))
                for values in zip(
                    layers.layers, layers.sides, layers.mean, layers.lowest, layers.highest, strict=True
                )
            ],
            "experts_by_group": [] if layers is None else [group.to_json() for group in layers.by_group],
        }


def _similarity(pairs: Sequence[str], similarity: Similarities) -> list[Row]:
    encoder, decoder = similarity.encoder, similarity.decoder
    if encoder is None or decoder is None:
        return []
    return [
        {
            "first_pair": pairs[row],
            "second_pair": pairs[column],
            "encoder_jaccard": encoder[row][column],
            "decoder_jaccard": decoder[row][column],
        }
        for row, column in combinations(range(len(pairs)), 2)
    ]
