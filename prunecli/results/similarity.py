"""similarity.json: similarity of components of models; head-comparison.json: importance of heads in two runs."""

from __future__ import annotations

from itertools import chain, product
from typing import Any, ClassVar

from pydantic import Field, model_validator

from prunecli.results.document import Count, Document, Number, Record, Tables, picked


class Component(Record):
    """A component of a compared model."""

    name: str
    label: str
    side: str
    layer: int | None = None
    kind: str = ""


class Similarity(Document):
    """similarity.json: of two models, or of one with itself.

    Attributes:
        random_seeds: of the random weights that the first model was compared with.
        components: `first` (and `second`) -> the model's components.
        left_out: the same -> those `removed`, and those `constant` over all sentences.
        matrices: measure -> `first`, `second`, `between` -> `[rows, columns]`.
        corresponding: of two models: the diagonal; a row each.
        successive: of one model: each component with the next; a row each.
        mean: side -> measure -> mean of these.
    """

    FORMAT: ClassVar[str] = "prunecli.similarity/1"

    checkpoints: list[str] = Field(min_length=1)
    benchmarks: list[str] = Field(default_factory=list)
    random_seeds: list[int] = Field(default_factory=list)
    device: str = ""
    dtype: str = ""
    context: int | None = None
    text: list[dict[str, Any]] = Field(default_factory=list)
    components: dict[str, list[Component]]
    left_out: dict[str, dict[str, list[str]]] = Field(default_factory=dict)
    matrices: dict[str, dict[str, list[list[Number | None]]]]
    corresponding: list[dict[str, Any]] | None = None
    successive: list[dict[str, Any]] | None = None
    mean: dict[str, dict[str, Number | None]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _matrices_of_components(self) -> Similarity:
        for matrices in self.matrices.values():
            for name, matrix in matrices.items():
                rows, columns = (self.components.get(key, []) for key in ends_of(name))
                if len(matrix) != len(rows) or any(len(row) != len(columns) for row in matrix):
                    raise ValueError(f"matrices: {name} has not a row and a column for each component")
        return self

    def _tables(self) -> Tables:
        """`corresponding` or `successive`, `mean`, and `matrices`: a row for each cell and measure."""
        key = "successive" if self.corresponding is None else "corresponding"
        known = {component.name: component.to_json() for component in self.components["first"]}
        pairs = [
            {**picked(known[row["first"]], ("side", "layer", "kind")), **row}
            for row in self.corresponding or self.successive or ()
        ]
        mean = [{"side": side, **values} for side, values in self.mean.items()]
        rows = [
            {"measure": measure, "matrix": name, "row": row.name, "column": column.name, "similarity": value}
            for measure, matrices in self.matrices.items()
            for name, matrix in matrices.items()
            for (row, column), value in zip(
                product(*(self.components[key] for key in ends_of(name))), chain(*matrix), strict=True
            )
        ]
        return {key: pairs, "mean": mean, "matrices": rows}


def ends_of(matrix: str) -> tuple[str, str]:
    """The models whose components are the rows and the columns of a matrix of similarity.json."""
    return ("first", "second") if matrix == "between" else (matrix, matrix)


class Scored(Record):
    """One of the compared files: what heads.json says that its values are."""

    file: str
    method: str
    task: str
    examples: Count
    importance: str | None = None
    metric: str | None = None
    base: Number | None = None


class ComparedHead(Record):
    """A head of both files.

    Attributes:
        kind: of its attention; "heads" where the family is not known.
        head: its original id.
        first, second: its importance: I_h, or what the score loses without the head.
    """

    attention: str
    kind: str
    layer: int
    head: Count
    first: Number
    second: Number


class Correlation(Record):
    """Correlation of two importances of the same heads.

    Attributes:
        of: "all", or a kind of attention.
        heads: how many.
        pearson, spearman: of the values, of their ranks; None for fewer than three heads, or where one file gives
            all of them the same value.
        pearson_p, spearman_p: two-sided p-values of no correlation.
    """

    of: str
    heads: Count
    pearson: Number | None = None
    pearson_p: Number | None = None
    spearman: Number | None = None
    spearman_p: Number | None = None


class HeadComparison(Document):
    """head-comparison.json: how the importances of the heads correlate in two runs (1905.10650, 3.4).

    Attributes:
        first, second: the compared files.
        correlations: of all heads, then of each kind of attention.
        left_out: heads that only one of the files has.
        heads: those of both.
    """

    FORMAT: ClassVar[str] = "prunecli.head-comparison/1"

    first: Scored
    second: Scored
    correlations: list[Correlation] = Field(min_length=1)
    left_out: Count = 0
    heads: list[ComparedHead] = Field(min_length=1)
