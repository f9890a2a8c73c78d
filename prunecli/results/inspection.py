"""What `inspect --json` prints: parameters by part, layers, experts, heads, FFNs, and what fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from prunecli.architectures.records import Side
from prunecli.results.document import Count, Document, Record
from prunecli.results.header import header
from prunecli.results.tabled import Tables, picked

if TYPE_CHECKING:
    from prunecli.model.attention import AttentionLayer
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.model.ffn import FfnLayer
    from prunecli.model.inventory import Inventory

WAY = ("device", "dtype", "ratio", "weight_bytes", "needed_bytes", "fits", "state_tokens")


class Amount(Record):
    """Tensors, their parameters and bytes."""

    tensors: Count
    parameters: Count
    bytes: Count


class Stack(Record):
    """Layers of one stack: original numbers."""

    side: Side
    layers: list[Count]
    original_layers: Count


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
    sparse: bool = False


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
    """Those layer by layer, and the batches that they are for."""

    batch_tokens: Count | None = None
    batch_length: Count | None = None
    ways: list[Way]


class ComputingTime(Record):
    """Matrix products of a pass on a device, at its measured speed."""

    device: str
    dtype: str
    threads: Count
    operations_per_second: float
    computing_seconds: float
    seconds: float


class Pass(Record):
    """How long a pass of the assumed text takes layer by layer."""

    sentences: Count
    sentence_tokens: Count
    pairs: Count
    bytes: int
    operations: int
    disk_bytes_per_second: float
    from_disk: bool
    reading_seconds: float
    computing: list[ComputingTime]


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
    one_pass: Pass | None = Field(default=None, alias="pass")
    unknown: list[str] = Field(default_factory=list)


class Surmise(Record):
    """What names of tensors tell of a family that is not supported."""

    modules: dict[str, list[str]]
    tables: list[str] = Field(default_factory=list)
    layers: dict[str, int] = Field(default_factory=dict)
    experts: dict[str, int] = Field(default_factory=dict)
    quantisation: str = ""
    text_type: str = ""
    nearest: str = ""


class Quantisation(Record):
    """How it is quantised: stored how -> matrices, bits over all parameters, modules that are named and not there."""

    method: str = ""
    schemes: dict[str, Count] = Field(default_factory=dict)
    weights: Count = 0
    parameters: Count = 0
    bits_per_parameter: float = 0.0
    absent: list[str] = Field(default_factory=list)


class Inspection(Document):
    """What `inspect --json` prints."""

    FORMAT: ClassVar[str] = "prunecli.inspect/1"

    total: Amount
    parts: dict[str, Amount]
    dtypes: dict[str, Amount] = Field(default_factory=dict)
    stacks: list[Stack] = Field(default_factory=list)
    layers: list[SparseLayer]
    attentions: list[Attention]
    ffns: list[Ffn]
    embedding: dict[str, Any] = Field(default_factory=dict)
    files: list[dict[str, Any]] = Field(default_factory=list)
    surmise: Surmise | None = None
    quantisation: Quantisation | None = None
    history: list[dict[str, Any]] = Field(default_factory=list)
    fit: Fit | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, inventory: Inventory, fit: Fit | None = None) -> Inspection:
        """What a checkpoint holds; `fit` is the answer to --fit."""

        def fields(layer: AttentionLayer | FfnLayer, *names: str) -> dict[str, Any]:
            found = {name: getattr(layer, name) for name in ("name", *names, "removed")}
            return {**found, "shared_with": layer.owner if layer.is_shared else None}

        attentions = [fields(layer, "kind", "heads", "original_heads") for layer in inventory.attentions]
        ffns = [
            {**fields(layer, "side", "layer", "width"), "sparse": layer.is_sparse} for layer in inventory.ffns
        ]
        files = [
            {"name": str(path.relative_to(checkpoint.path)), "bytes": checkpoint.file_bytes(path)}
            for path in checkpoint.files
        ]
        return cls.model_validate(
            {
                **header(cls.FORMAT, [checkpoint], None),
                "total": inventory.total,
                "parts": inventory.parts,
                "dtypes": inventory.dtypes,
                "stacks": inventory.stacks,
                "layers": inventory.layers,
                "attentions": attentions,
                "ffns": ffns,
                "embedding": {} if inventory.tables is None else inventory.tables.change.to_json(),
                "files": files,
                "surmise": inventory.surmise,
                "quantisation": inventory.quantisation,
                "history": checkpoint.structure.history,
                **({} if fit is None else {"fit": fit}),
            }
        )

    def _tables(self) -> Tables:
        """`parameters`, `stacks`, `experts`, `heads`, `ffns`, `modules` (of a family that is not supported), `fit`."""
        modules = {} if self.surmise is None else self.surmise.modules
        fit, ways = self.fit, dict[str, list[Way]]()
        if fit is not None:
            ways = {"whole": fit.whole, "pruned": fit.pruned, "layer by layer": fit.by_layer.ways}
        return {
            "parameters": [
                {
                    "part": part,
                    **amount.to_json(),
                    "share_of_bytes": amount.bytes / max(1, self.total.bytes),
                }
                for part, amount in {**self.parts, "total": self.total}.items()
            ],
            "stacks": [{**one.to_json(), "layers": len(one.layers)} for one in self.stacks],
            "experts": [{**one.to_json(), "experts": len(one.experts)} for one in self.layers],
            "heads": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "heads": len(one.heads),
                    "original_heads": one.original_heads,
                }
                for one in self.attentions
            ],
            "ffns": [layer.to_json() for layer in self.ffns],
            "modules": [{"module": name, "tensors": len(names)} for name, names in modules.items()],
            "fit": [
                {
                    "way": name,
                    **picked(way.to_json(), WAY),
                    "besides_bytes": way.needed_bytes - way.weight_bytes,
                }
                for name, group in ways.items()
                for way in group
            ],
        }
