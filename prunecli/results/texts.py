"""texts.json: which experts of a language model texts share, and how texts cluster by them."""

from __future__ import annotations

from itertools import combinations
from typing import Any, ClassVar

from pydantic import Field, model_validator

from prunecli.results.document import Count, Document, Number, Record
from prunecli.results.languages import check_linkage, joined
from prunecli.results.tabled import Tables


class TextTree(Record):
    """The clustering of texts.

    Attributes:
        order: the leaves side by side, as the tree lists them.
        clusters: nested: {"distance", "members": [text or cluster, …]}.
        matrix: scipy's linkage matrix, `[texts - 1, 4]`.
    """

    texts: list[str] = Field(min_length=2)
    order: list[str] = Field(default_factory=list)
    clusters: dict[str, Any] = Field(default_factory=dict)
    matrix: list[tuple[Number, Number, Number, Number]]

    @model_validator(mode="after")
    def _is_a_tree(self) -> TextTree:
        check_linkage(len(self.texts), self.matrix)
        return self


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

    FORMAT: ClassVar[str] = "prunecli.texts/1"

    statistics: list[str] = Field(default_factory=list)
    metric: str
    ratio: Number
    linkage: str = ""
    texts: list[str] = Field(min_length=1)
    families: dict[str, str] = Field(default_factory=dict)
    similarity: list[list[Number]]
    clustering: TextTree | None = None
    layers: list[TextLayer]

    @model_validator(mode="after")
    def _matrix_of_texts(self) -> Texts:
        if {len(self.similarity), *map(len, self.similarity)} != {len(self.texts)}:
            raise ValueError("similarity: not a row and a column for each text")
        return self

    def _tables(self) -> Tables:
        """`similarity` (each two texts once), `clusters` (as they join), `layers`."""
        tree = self.clustering
        pairs = combinations(range(len(self.texts)), 2)
        return {
            "similarity": [
                {
                    "first": self.texts[one],
                    "second": self.texts[other],
                    "jaccard": self.similarity[one][other],
                }
                for one, other in pairs
            ],
            "clusters": [] if tree is None else joined(tree.texts, tree.matrix),
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
