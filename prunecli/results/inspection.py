"""The result of `inspect --json`: parameters by part, layers, experts, heads, FFNs, and what fits."""

from __future__ import annotations

from dataclasses import asdict

from pydantic import AliasChoices, Field

from prunecli.model.checkpoint import Checkpoint
from prunecli.model.inventory import Amount, Inventory, Quantisation, StackLayers
from prunecli.results.document import Count, Document, Json, Record, Tables, cells


class SparseLayer(Record):
    """Experts of one layer: original ids."""

    name: str
    experts: list[Count]
    original_experts: Count


class Attention(Record):
    """Heads of one attention: original ids; `shared_with` is the layer whose tensors it has."""

    name: str
    kind: str
    heads: list[Count]
    original_heads: Count
    shared_with: str | None = None
    removed: bool = False


class Ffn(Record):
    """One FFN; `shared_with` is the layer whose tensors it has."""

    name: str
    side: str = ""
    layer: int | None = None
    width: int | None = None
    shared_with: str | None = None
    removed: bool = False
    sparse: bool = Field(default=False, validation_alias=AliasChoices("sparse", "is_sparse"))


class Way(Record):
    """One way to hold the model in the memory of --fit."""

    device: str | None = None
    dtype: str = ""
    as_stored: bool | None = None
    weight_bytes: Count
    cache_bytes: Count | None = None
    decoding_bytes: Count | None = None
    needed_bytes: Count
    fits: bool
    state_tokens: int | None = None
    ratio: float | None = None
    keep: Count | None = None
    held: Count | None = None


class LayerWays(Record):
    """Ways to run layer by layer, and their batches."""

    batch_tokens: Count | None = None
    batch_length: Count | None = None
    ways: list[Way]


class Fit(Record):
    """The answer to --fit; from `margin_bytes` to `held` where removing experts makes it fit."""

    budget_bytes: Count | None = None
    batch: Count | None = None
    beam: Count | None = None
    length: Count | None = None
    margin_bytes: Count | None = None
    dense_bytes: Count | None = None
    expert_bytes: Count | None = None
    cache_bytes: Count | None = None
    activation_bytes: Count | None = None
    ratio: float | None = None
    keep: Count | None = None
    held: Count | None = None
    whole: list[Way]
    pruned: list[Way]
    by_layer: LayerWays
    unknown: list[str] = []


class Inspection(Document):
    """The result of `inspect --json`."""

    FORMAT = "prunecli.inspect/1"

    total: Amount
    parts: dict[str, Amount]
    dtypes: dict[str, Amount] = {}
    stacks: list[StackLayers] = []
    layers: list[SparseLayer]
    attentions: list[Attention]
    ffns: list[Ffn]
    embedding: Json = {}
    files: list[Json] = []
    modules: dict[str, tuple[str, ...]] = {}
    quantisation: Quantisation | None = None
    history: list[Json] = []
    fit: Fit | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, inventory: Inventory, fit: Fit | None = None) -> Inspection:
        """Make the result from an inventory; `fit` is the answer to --fit."""
        found = dict(vars(inventory))
        tables = found.pop("tables")
        files = [
            {"name": str(path.relative_to(checkpoint.path)), "bytes": checkpoint.file_bytes(path)}
            for path in checkpoint.files
        ]
        return cls.model_validate(
            {
                **cls.header([checkpoint], None),
                **found,
                "embedding": {} if tables is None else tables.change.to_json(),
                "files": files,
                "history": checkpoint.structure.history,
                **({} if fit is None else {"fit": fit}),
            }
        )

    def _tables(self) -> Tables:
        """`parameters`, `stacks`, `experts`, `heads`, `ffns`, `modules` (tensors of no known part), `fit`."""
        fit, ways = self.fit, dict[str, list[Way]]()
        if fit is not None:
            ways = {"whole": fit.whole, "pruned": fit.pruned, "layer by layer": fit.by_layer.ways}
        whole = max(1, self.total.bytes)
        return {
            "parameters": [
                {"part": part, **asdict(amount), "share_of_bytes": amount.bytes / whole}
                for part, amount in {**self.parts, "total": self.total}.items()
            ],
            "stacks": [cells(asdict(one)) for one in self.stacks],
            "experts": [cells(one.to_json()) for one in self.layers],
            "heads": [cells(one.to_json()) for one in self.attentions],
            "ffns": [layer.to_json() for layer in self.ffns],
            "modules": [{"module": name, "tensors": len(names)} for name, names in self.modules.items()],
            "fit": [
                {"way": name, **way.to_json(), "besides_bytes": way.needed_bytes - way.weight_bytes}
                for name, group in ways.items()
                for way in group
            ],
        }
