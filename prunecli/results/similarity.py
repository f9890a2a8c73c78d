"""similarity.json: similarity of components of models; head-comparison.json: importance of heads in two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any, Literal

from pydantic import AliasChoices, Field, model_validator

from prunecli.errors import StatisticsError
from prunecli.model.axes import module_of
from prunecli.model.parts import KIND_NAMES, KINDS, kind_and_layer
from prunecli.results.document import (
    Cells,
    Count,
    Document,
    Json,
    Model,
    Number,
    Record,
    Shown,
    Tables,
    check_matrix,
    maybe,
    numbers,
)
from prunecli.results.evaluation import LOWER_IS_BETTER
from prunecli.results.unit_scores import Scores


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

    FORMAT = "prunecli.similarity/1"

    checkpoints: list[str] = Field(min_length=1)
    benchmarks: list[str] = []
    random_seeds: list[int] = []
    device: str = ""
    dtype: str = ""
    context: int | None = None
    text: list[Json] = []
    components: dict[str, list[Component]]
    left_out: dict[str, dict[str, list[str]]] = {}
    matrices: dict[Literal["cka", "lns"], dict[str, list[list[Number | None]]]]
    corresponding: list[Json] | None = None
    successive: list[Json] | None = None
    mean: dict[str, dict[str, Number | None]] = {}

    @model_validator(mode="after")
    def _matrices_of_components(self) -> Similarity:
        for matrices in self.matrices.values():
            for name, matrix in matrices.items():
                check_matrix(matrix, *(self.components.get(key, []) for key in ends_of(name)))
        names = {component.name for component in self.components.get("first", [])}
        ends = ("first",) if self.corresponding is not None else ("first", "second")
        if any(row.get(end) not in names for row in self.pairs for end in ends):
            raise ValueError("a pair of components that are not there")
        return self

    @property
    def pairs(self) -> list[Json]:
        """The corresponding components of two models, or the successive components of one."""
        return self.corresponding or self.successive or []

    @property
    def about(self) -> str:
        """See `Document`."""
        texts = [str(text.get("name")) for text in self.text]
        named = ", ".join(texts[:4]) + ("…" if len(texts) > 4 else "")
        benchmarks = f" Benchmarks: {', '.join(self.benchmarks)}." if self.benchmarks else ""
        return f"{' and '.join(self.checkpoints[:2])} on {named or 'unnamed text'}.{benchmarks}"

    @property
    def summed_up(self) -> tuple[str, ...]:
        """See `Document`."""
        return ("matrices",)

    @property
    def shown(self) -> Iterator[Shown]:
        """Yield similarities of `pairs` by side and layer, then their means."""
        names, (pairs, mean, _) = " and ".join(self.checkpoints[:2]), self._tables().values()
        labels = {component.name: component.label for component in self.components["first"]}
        for side in self.mean:
            lines: dict[Any, Cells] = {}
            for measure, row in product(self.matrices, pairs):
                if row["side"] != side:
                    continue
                heading, first = measure.upper(), row["first"]
                if self.corresponding is None:
                    line = lines.setdefault(
                        first, {"component": labels[first], "next": labels[row["second"]]}
                    )
                else:
                    heading += f" {COLUMNS.get(row['kind'], row['kind'])}"
                    line = lines.setdefault(row["layer"], {"layer": str(row["layer"])})
                line[heading] = maybe("{:.3f}", numbers(row).get(measure))
            yield Shown(f"{names}, {side}", [*lines.values()], 1 if self.corresponding else 2)
        means = {"mean of the": "{side}"} | {
            title.format(measure.upper()): form.format(measure)
            for measure in self.matrices
            for title, form in MEANS.items()
        }
        yield Shown.of("Means", mean, means)

    def _tables(self) -> Tables:
        """`corresponding` or `successive`, `mean`, and `matrices`: a row for each cell and measure."""
        key = "successive" if self.corresponding is None else "corresponding"
        places = {one.name: (one.side, one.layer, one.kind) for one in self.components["first"]}
        pairs = [
            {**dict(zip(("side", "layer", "kind"), places[row["first"]], strict=True)), **row}
            for row in self.pairs
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


COLUMNS = {"self": "self", "cross": "cross", "ffn": "FFN"}
"""Kind of a component -> its column: self-attention, cross-attention, FFN."""
MEANS = {
    "{}": "{{{}:.3f}}",
    "{}, % of the benchmarks": "{{{}_normalised:.1f}}",
    "{}, random": "{{{}_random:.3f}}",
}
"""Column of a mean -> the form of its cells."""


def ends_of(matrix: str) -> tuple[str, str]:
    """The models whose components are the rows and the columns of a matrix of similarity.json."""
    return ("first", "second") if matrix == "between" else (matrix, matrix)


class Scored(Record):
    """One of the compared files: what heads.json says that its values are."""

    file: str
    method: str
    task: str
    examples: Count
    importance: str | None = Field(default=None, validation_alias=AliasChoices("importance", "per"))
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

    FORMAT = "prunecli.head-comparison/1"

    first: Scored
    second: Scored
    correlations: list[Correlation] = Field(min_length=1)
    left_out: Count = 0
    heads: list[ComparedHead] = Field(min_length=1)

    @property
    def shown(self) -> Iterator[Shown]:
        """Yield the correlations."""
        rows = [{**vars(row), "of": KIND_NAMES.get(row.of, row.of)} for row in self.correlations]
        columns = {
            "attention": "{of}",
            "heads": "{heads:,}",
            "Pearson r": "{pearson:.3f}",
            "p": "{pearson_p:.2g}",
            "Spearman r": "{spearman:.3f}",
            "p of its rank": "{spearman_p:.2g}",
        }
        yield Shown.of(f"Importance of heads, {self.first.file} and {self.second.file}", rows, columns)


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
        kind, layer = kind_and_layer(attention)
        one, other = (own[attention, head] for own in values)
        heads.append(
            ComparedHead(attention=attention, kind=kind, layer=layer, head=head, first=one, second=other)
        )
    models = [Model(fingerprint=one.fingerprint, model_type=one.model_type) for one in scores]
    shared = {"method", "task", "examples", "per", "metric", "base"}
    compared = [
        Scored(file=file, **one.model_dump(include=shared, exclude_none=True))
        for file, one in zip(files, scores, strict=True)
    ]
    return HeadComparison(
        **HeadComparison.header([]) | {"models": models},
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
    pair = [one.first for one in heads], [one.second for one in heads]
    found: dict[str, float] = {}
    if len(heads) >= LEAST_HEADS and all(len(set(values)) > 1 for values in pair):
        from scipy.stats import pearsonr, spearmanr

        for name, test in (("pearson", pearsonr), ("spearman", spearmanr)):
            result = test(*pair)
            found |= {name: round(float(result.statistic), 6), f"{name}_p": float(result.pvalue)}
    return Correlation(of=of, heads=len(heads), **found)


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
