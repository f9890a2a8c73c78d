"""The fields of the result files that reports and tables show; whatever else they hold is passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Optional

from pydantic import BaseModel, ConfigDict, Field, model_validator

LARGEST = 1e15
"""No figure of a result is larger; a chart of larger ones would overflow."""
Count = Annotated[int, Field(ge=0, le=10**18)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]


class _Schema(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Model(_Schema):
    """One of the header's models."""

    path: str = ""
    fingerprint: str = ""


class Evaluated(_Schema):
    """One checkpoint's scores; `mean` and `pairs` for translation, `scores` otherwise."""

    checkpoint: str
    mean: dict[str, Any] = Field(default_factory=dict)
    scores: dict[str, Any] = Field(default_factory=dict)
    pairs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    p_value: Optional[Number] = None  # noqa: UP045 (pydantic reads it at run time, on Python 3.10 too)
    parameters: Optional[Count] = None  # noqa: UP045
    checkpoint_bytes: Optional[Count] = None  # noqa: UP045


class Evaluation(_Schema):
    """evaluation.json."""

    task: str
    models: list[Model] = Field(default_factory=list)
    data: dict[str, Any] = Field(default_factory=dict)
    pairs: list[str] = Field(default_factory=list)
    significance: Optional[dict[str, Any]] = None  # noqa: UP045
    results: list[Evaluated] = Field(min_length=1)


class Spread(_Schema):
    """Mean and deviation."""

    mean: Number
    std: Number = 0.0


class Timing(_Schema):
    """One checkpoint's speed at one batch size and beam."""

    batch_size: Count
    beam: Count
    tokens_per_second: Spread
    seconds_per_sentence: Spread
    speedup: Spread


class Timed(_Schema):
    """One checkpoint's speed and size."""

    checkpoint: str
    parameters: Count
    checkpoint_bytes: Count
    load_s: Optional[Number] = None  # noqa: UP045
    resident_peak: Optional[Count] = None  # noqa: UP045
    device_peak: Optional[Count] = None  # noqa: UP045
    timings: list[Timing] = Field(min_length=1)


class Latency(_Schema):
    """latency.json."""

    models: list[Model] = Field(default_factory=list)
    pair: str
    sentences: Count
    new_tokens: Count
    runs: Count
    warm_up: Count = 0
    device: str
    threads: Optional[Count] = None  # noqa: UP045
    results: list[Timed] = Field(min_length=1)


class Tree(_Schema):
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


class Relation(_Schema):
    """How alike the experts of pairs are."""

    comparisons: Count
    mean: Number
    lowest: Number
    highest: Number


class Similarities(_Schema):
    """Jaccard similarities of pairs; [pairs, pairs] a side."""

    relations: dict[str, dict[str, Optional[Relation]]]  # noqa: UP045
    encoder: list[list[Number]]
    decoder: list[list[Number]]


class Clustering(_Schema):
    """Trees by side."""

    linkage: str
    encoder: Optional[Tree] = None  # noqa: UP045
    decoder: Optional[Tree] = None  # noqa: UP045


class ExpertsPerLayer(_Schema):
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


class Languages(_Schema):
    """languages.json."""

    metric: str
    ratio: Number
    strategy: str
    mode: str = ""
    pairs: list[str]
    similarity: Optional[Similarities] = None  # noqa: UP045
    clustering: Clustering
    experts_per_layer: Optional[ExpertsPerLayer] = None  # noqa: UP045

    @model_validator(mode="after")
    def _matrices_of_pairs(self) -> Languages:
        if self.similarity is not None:
            for side in (self.similarity.encoder, self.similarity.decoder):
                if len(side) != len(self.pairs) or any(len(row) != len(self.pairs) for row in side):
                    raise ValueError("similarity: not a row and a column for each pair")
        return self


class Component(_Schema):
    """A component of a compared model."""

    name: str
    label: str
    side: str


class Similarity(_Schema):
    """similarity.json."""

    checkpoints: list[str] = Field(min_length=1)
    benchmarks: list[str] = Field(default_factory=list)
    text: list[dict[str, Any]] = Field(default_factory=list)
    components: dict[str, list[Component]]
    matrices: dict[str, dict[str, list[list[Optional[Number]]]]]  # noqa: UP045
    mean: dict[str, dict[str, Optional[Number]]] = Field(default_factory=dict)  # noqa: UP045

    @model_validator(mode="after")
    def _matrices_of_components(self) -> Similarity:
        for matrices in self.matrices.values():
            for name, matrix in matrices.items():
                rows, columns = (self.components.get(key, []) for key in ends_of(name))
                if len(matrix) != len(rows) or any(len(row) != len(columns) for row in matrix):
                    raise ValueError(f"matrices: {name} has not a row and a column for each component")
        return self


class LoggedStep(_Schema):
    """A line of a training's log."""

    step: Count
    loss: Number
    chrf: Optional[Number] = Field(default=None, alias="chrf++")  # noqa: UP045


class Finetune(_Schema):
    """OUTPUT.finetune.json."""

    models: list[Model] = Field(default_factory=list)
    output: str
    steps: Count
    tokens: Count = 0
    tokens_per_second: Number = 0.0
    best: Optional[dict[str, Any]] = None  # noqa: UP045
    arguments: dict[str, Any] = Field(default_factory=dict)
    training: list[LoggedStep] = Field(default_factory=list)
    validation: list[LoggedStep] = Field(default_factory=list)


class GateSums(_Schema):
    """The sums of one entry: a value a layer, then a row of experts for each layer."""

    tokens: list[Number]
    top1: list[list[Number]]
    top2: list[list[Number]]
    gate_sum: list[list[Number]]
    conf1_sum: list[list[Number]]
    conf2_sum: list[list[Number]]


class Gates(_Schema):
    """gates.json."""

    mode: str
    layers: list[str]
    num_experts: Count
    entries: dict[str, GateSums] = Field(min_length=1)

    @model_validator(mode="after")
    def _of_all_experts(self) -> Gates:
        for pair, sums in self.entries.items():
            for name, value in sums:
                rows = value if name != "tokens" else [[] for _ in value]
                experts = self.num_experts if name != "tokens" else 0
                if len(rows) != len(self.layers) or any(len(row) != experts for row in rows):
                    raise ValueError(f"entries: {pair}: {name} has not a value for each layer and expert")
        return self


class HeadEffects(_Schema):
    """The scores of one metric: attention -> a value for each head."""

    base: Optional[Number] = None  # noqa: UP045
    without: dict[str, list[Number]] = Field(default_factory=dict)
    only: dict[str, list[Number]] = Field(default_factory=dict)
    p_value: dict[str, list[Number]] = Field(default_factory=dict)


class BestHeads(_Schema):
    """What the best head of each layer reaches on other text."""

    base: Number
    only: dict[str, Number]
    p_value: dict[str, Number]


class Heads(HeadEffects):
    """heads.json."""

    method: Literal["gradient", "ablation", "all-but-one"]
    examples: Annotated[int, Field(ge=1)]
    heads: dict[str, list[Count]] = Field(min_length=1)
    sum: dict[str, list[Number]] = Field(default_factory=dict)
    tokens: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    metric: Optional[str] = None  # noqa: UP045
    also: dict[str, HeadEffects] = Field(default_factory=dict)
    best: dict[str, Count] = Field(default_factory=dict)
    reported: Optional[BestHeads] = None  # noqa: UP045

    @model_validator(mode="after")
    def _of_all_heads(self) -> Heads:
        key = {"gradient": "sum", "ablation": "without", "all-but-one": "only"}[self.method]
        of = {"": self, **self.also}
        for metric, found in of.items():
            values = {key: getattr(found, key), **({"p_value": found.p_value} if found.p_value else {})}
            if self.method != "gradient" and (found.base is None or self.metric is None):
                raise ValueError(f"{metric or self.method}: no base")
            for name, by_layer in values.items():
                if {layer: len(row) for layer, row in by_layer.items()} != {
                    layer: len(ids) for layer, ids in self.heads.items()
                }:
                    raise ValueError(f"{name}: not a value for each head")
        for layer, head in self.best.items():
            if head not in self.heads.get(layer, ()):
                raise ValueError(f"best: {layer} has no head {head}")
            if self.reported and not {layer} <= set(self.reported.only) & set(self.reported.p_value):
                raise ValueError(f"reported: lacks {layer}")
        return self


class Amount(_Schema):
    """Tensors, their parameters and bytes."""

    tensors: Count
    parameters: Count
    bytes: Count


class SparseLayer(_Schema):
    """Experts of one layer."""

    name: str
    experts: list[Count]
    original_experts: Count


class AttentionLayer(_Schema):
    """Heads of one attention."""

    name: str
    kind: str
    heads: list[Count]
    original_heads: Count


class Ffn(_Schema):
    """One FFN."""

    name: str


class Way(_Schema):
    """One way to hold the model in the memory of --fit."""

    weight_bytes: Count
    needed_bytes: Count
    fits: bool


class LayerWays(_Schema):
    """Those layer by layer."""

    ways: list[Way]


class Fit(_Schema):
    """The answer to --fit."""

    whole: list[Way]
    pruned: list[Way]
    by_layer: LayerWays


class Surmise(_Schema):
    """What names of tensors tell of a family that is not supported."""

    modules: dict[str, list[str]]


class Inspection(_Schema):
    """What `inspect --json` prints."""

    total: Amount
    parts: dict[str, Amount]
    layers: list[SparseLayer]
    attentions: list[AttentionLayer]
    ffns: list[Ffn]
    surmise: Optional[Surmise] = None  # noqa: UP045
    fit: Optional[Fit] = None  # noqa: UP045


SCHEMAS: Mapping[str, type[_Schema]] = {
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
