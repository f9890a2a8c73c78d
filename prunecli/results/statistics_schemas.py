"""The fields of gates.json, heads.json and of what `inspect --json` prints, as far as tables show them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from prunecli.results.fields import Count, Number, Schema


class GateSums(Schema):
    """The sums of one entry: a value a layer, then a row of experts for each layer."""

    tokens: list[Number]
    top1: list[list[Number]]
    top2: list[list[Number]]
    gate_sum: list[list[Number]]
    conf1_sum: list[list[Number]]
    conf2_sum: list[list[Number]]


class Gates(Schema):
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


class HeadEffects(Schema):
    """The scores of one metric: attention -> a value for each head."""

    base: Number | None = None
    without: dict[str, list[Number]] = Field(default_factory=dict)
    only: dict[str, list[Number]] = Field(default_factory=dict)
    p_value: dict[str, list[Number]] = Field(default_factory=dict)


class BestHeads(Schema):
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
    metric: str | None = None
    also: dict[str, HeadEffects] = Field(default_factory=dict)
    best: dict[str, Count] = Field(default_factory=dict)
    reported: BestHeads | None = None

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


class Amount(Schema):
    """Tensors, their parameters and bytes."""

    tensors: Count
    parameters: Count
    bytes: Count


class SparseLayer(Schema):
    """Experts of one layer."""

    name: str
    experts: list[Count]
    original_experts: Count


class AttentionLayer(Schema):
    """Heads of one attention."""

    name: str
    kind: str
    heads: list[Count]
    original_heads: Count


class Ffn(Schema):
    """One FFN."""

    name: str


class Way(Schema):
    """One way to hold the model in the memory of --fit."""

    weight_bytes: Count
    needed_bytes: Count
    fits: bool


class LayerWays(Schema):
    """Those layer by layer."""

    ways: list[Way]


class Fit(Schema):
    """The answer to --fit."""

    whole: list[Way]
    pruned: list[Way]
    by_layer: LayerWays


class Surmise(Schema):
    """What names of tensors tell of a family that is not supported."""

    modules: dict[str, list[str]]


class Inspection(Schema):
    """What `inspect --json` prints."""

    total: Amount
    parts: dict[str, Amount]
    layers: list[SparseLayer]
    attentions: list[AttentionLayer]
    ffns: list[Ffn]
    surmise: Surmise | None = None
    fit: Fit | None = None
