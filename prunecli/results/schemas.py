"""The fields of the result files that reports and tables show; whatever else they hold is passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from prunecli.results.fields import LARGEST, Count, Number, Schema
from prunecli.results.statistics_schemas import Gates, Heads, Inspection


class Model(Schema):
    """One of the header's models."""

    path: str = ""
    fingerprint: str = ""


class Evaluated(Schema):
    """One checkpoint's scores; `mean` and `pairs` for translation, `scores` otherwise."""

    checkpoint: str
    mean: dict[str, Any] = Field(default_factory=dict)
    scores: dict[str, Any] = Field(default_factory=dict)
    pairs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    p_value: Number | None = None
    parameters: Count | None = None
    checkpoint_bytes: Count | None = None


class Evaluation(Schema):
    """evaluation.json."""

    task: str
    models: list[Model] = Field(default_factory=list)
    data: dict[str, Any] = Field(default_factory=dict)
    pairs: list[str] = Field(default_factory=list)
    significance: dict[str, Any] | None = None
    results: list[Evaluated] = Field(min_length=1)


class Spread(Schema):
    """Mean and deviation."""

    mean: Number
    std: Number = 0.0


class Timing(Schema):
    """One checkpoint's speed at one batch size and beam."""

    batch_size: Count
    beam: Count
    tokens_per_second: Spread
    seconds_per_sentence: Spread
    speedup: Spread


class Timed(Schema):
    """One checkpoint's speed and size."""

    checkpoint: str
    parameters: Count
    checkpoint_bytes: Count
    load_s: Number | None = None
    resident_peak: Count | None = None
    device_peak: Count | None = None
    timings: list[Timing] = Field(min_length=1)


class Latency(Schema):
    """latency.json."""

    models: list[Model] = Field(default_factory=list)
    pair: str
    sentences: Count
    new_tokens: Count
    runs: Count
    warm_up: Count = 0
    device: str
    threads: Count | None = None
    results: list[Timed] = Field(min_length=1)


class Tree(Schema):
    """The clustering of languages on one side."""

    languages: list[str] = Field(min_length=2)
    matrix: list[tuple[Count, Count, Number, Number]]

    @model_validator(mode="after")
    def _is_a_tree(self) -> Tree:
        leaves = len(self.languages)
        joined = [cluster for row in self.matrix for cluster in row[:2]]
        in_order = all(max(row[:2]) < leaves + index for index, row in enumerate(self.matrix))
        if len(self.matrix) != leaves - 1 or not in_order or len(set(joined)) != len(joined):
            raise ValueError("the matrix joins no tree of its languages")
        if any(row[2] < 0 for row in self.matrix):
            raise ValueError("a negative distance")
        return self


class Relation(Schema):
    """How alike the experts of pairs are."""

    comparisons: Count
    mean: Number
    lowest: Number
    highest: Number


class Similarities(Schema):
    """Jaccard similarities of pairs; [pairs, pairs] a side."""

    relations: dict[str, dict[str, Relation | None]]
    encoder: list[list[Number]]
    decoder: list[list[Number]]


class Clustering(Schema):
    """Trees by side."""

    linkage: str
    encoder: Tree | None = None
    decoder: Tree | None = None


class ExpertsPerLayer(Schema):
    """Experts that each layer keeps under the global threshold, over the pairs."""

    layers: list[str] = Field(min_length=1)
    mean: list[Number]
    lowest: list[Number]
    highest: list[Number]

    @model_validator(mode="after")
    def _of_one_length(self) -> ExpertsPerLayer:
        if {len(self.mean), len(self.lowest), len(self.highest)} != {len(self.layers)}:
            raise ValueError("experts_per_layer: not a value for each layer")
        return self


class Languages(Schema):
    """languages.json."""

    metric: str
    ratio: Number
    strategy: str
    mode: str = ""
    pairs: list[str]
    similarity: Similarities | None = None
    clustering: Clustering
    experts_per_layer: ExpertsPerLayer | None = None

    @model_validator(mode="after")
    def _matrices_of_pairs(self) -> Languages:
        if self.similarity is not None:
            for side in (self.similarity.encoder, self.similarity.decoder):
                if len(side) != len(self.pairs) or any(len(row) != len(self.pairs) for row in side):
                    raise ValueError("similarity: not a row and a column for each pair")
        return self


class Component(Schema):
    """A component of a compared model."""

    name: str
    label: str
    side: str


class Similarity(Schema):
    """similarity.json."""

    checkpoints: list[str] = Field(min_length=1)
    benchmarks: list[str] = Field(default_factory=list)
    text: list[dict[str, Any]] = Field(default_factory=list)
    components: dict[str, list[Component]]
    matrices: dict[str, dict[str, list[list[Number | None]]]]
    mean: dict[str, dict[str, Number | None]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _matrices_of_components(self) -> Similarity:
        for matrices in self.matrices.values():
            for name, matrix in matrices.items():
                rows, columns = (self.components.get(key, []) for key in ends_of(name))
                if len(matrix) != len(rows) or any(len(row) != len(columns) for row in matrix):
                    raise ValueError(f"matrices: {name} has not a row and a column for each component")
        return self


class LoggedStep(Schema):
    """A line of a training's log."""

    step: Count
    loss: Number
    chrf: Number | None = Field(default=None, alias="chrf++")


class Finetune(Schema):
    """OUTPUT.finetune.json."""

    models: list[Model] = Field(default_factory=list)
    output: str
    steps: Count
    tokens: Count = 0
    tokens_per_second: Number = 0.0
    best: dict[str, Any] | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    training: list[LoggedStep] = Field(default_factory=list)
    validation: list[LoggedStep] = Field(default_factory=list)


SCHEMAS: Mapping[str, type[Schema]] = {
    "prunecli.evaluation/1": Evaluation,
    "prunecli.latency/1": Latency,
    "prunecli.languages/1": Languages,
    "prunecli.similarity/1": Similarity,
    "prunecli.finetune/1": Finetune,
    "prunecli.gates/1": Gates,
    "prunecli.heads/1": Heads,
    "prunecli.inspect/1": Inspection,
}
"""Format -> its fields."""


def ends_of(matrix: str) -> tuple[str, str]:
    """Whose components the rows and the columns of a matrix of similarity.json are."""
    return ("first", "second") if matrix == "between" else (matrix, matrix)


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among values, NaN and those that are too large left out."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    }
