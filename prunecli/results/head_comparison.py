"""head-comparison.json: the importance of each head in two runs, and how the two correlate (1905.10650, 3.4)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from prunecli.results.document import Count, Document, Number, Record


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
    """How two importances of the same heads go together.

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
    """head-comparison.json.

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
