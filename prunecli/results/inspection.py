"""The result of `inspect --json`: parameters by part, layers, experts, heads, FFNs, and what fits."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from pydantic import AliasChoices, Field

from prunecli.model.checkpoint import Checkpoint
from prunecli.model.inventory import Amount, Inventory, Quantisation, StackLayers
from prunecli.results.document import Count, Document, Json, Record, Shown, Tables, cells
from prunecli.tensors.dtypes import config_dtype
from prunecli.tensors.quantities import bytes_text, counted, option_size


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

    def name(self, *, quantised: bool) -> str:
        """Return `ratio 0.25, float16, decoded`: how much of the model is held, and in which type."""
        stored = ", as stored" if self.as_stored else ", decoded" if quantised else ""
        name = "whole" if self.ratio is None else f"ratio {self.ratio:g}"
        return f"{name}, {self.dtype}{stored}"


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

    def shown(self, *, quantised: bool) -> Shown:
        """Return a row for each way; `quantised`: whether the weights are stored as codes."""
        named = [(way.name(quantised=quantised), way) for way in (*self.whole, *self.pruned)]
        named += [(f"layer by layer, {way.dtype}", way) for way in self.by_layer.ways]
        rows = [
            {
                **vars(way),
                "way": name,
                "besides": way.needed_bytes - way.weight_bytes,
                "is": ("no", "yes")[way.fits],
            }
            for name, way in named
        ]
        columns = {
            "way": "{way}",
            "weights": "{weight_bytes!b}",
            "besides": "{besides!b}",
            "together": "{needed_bytes!b}",
            "fits": "{is}",
        }
        return Shown.of(f"What fits in {bytes_text(self.budget_bytes or 0)}", rows, columns)

    def assumed(self, *, is_stock: bool) -> Iterator[str]:
        """Yield lines on what the figures assume; `is_stock`: whether the model runs in its stock class."""
        texts = counted(self.batch or 1, "text")
        yield f"Whole: {texts} decoding, beam {self.beam}, {self.length:,} tokens, and 10% of the memory free."
        if is_stock:
            first = self.whole[0]
            cache, decoding = first.cache_bytes or 0, first.decoding_bytes or 0
            yield (
                f"Besides: {bytes_text(cache)} of keys, values and states, "
                f"{bytes_text(decoding - cache)} of activations."
            )
        yield from self.unknown
        if pruned := {way.keep: way for way in self.pruned}:
            yield (
                "; ".join(
                    f"ratio {way.ratio:g} keeps {way.keep:,} of {way.held:,} experts"
                    for way in pruned.values()
                ).capitalize()
                + "."
            )
        if not self.by_layer.ways:
            return
        batch = f"batches of {self.by_layer.batch_tokens:,} tokens, {self.by_layer.batch_length:,}"
        yield f"Layer by layer (--memory): {batch} a {'window' if is_stock else 'sentence'}."
        if tokens := [
            f"{way.state_tokens:,} in {way.dtype}"
            for way in self.by_layer.ways
            if way.state_tokens is not None
        ]:
            yield f"Tokens' hidden states in memory: {', '.join(tokens)}; then a file."

    def next_steps(self, checkpoint: str, dtype: str | None, *, quantised: bool) -> Iterator[str]:
        """Yield whether the model fits, and else what makes it fit: the smallest ratio of experts, or shrink.

        Args:
            dtype: the type asked for; None: any will do.
            quantised: as stored and decoded are two things to run then, and said apart.
        """

        def pruning(pruned: Sequence[Way], cast: Callable[[Way], bool]) -> str:
            """The ratio of `pruned` that keeps most and fits, with its type if it is `cast`."""
            ratios = [way for way in pruned if way.fits]
            if not ratios:
                return "it does not fit, and no ratio of its experts makes it."
            least = min(ratios, key=lambda way: way.ratio or 0)
            words = ["prune-experts", checkpoint, "--ratio", f"{least.ratio:g}"]
            words += ["--dtype", least.dtype] if cast(least) else []
            return f"it does not fit with all its experts. Next: prunecli {shlex.join(words)}"

        if quantised:
            for way in self.whole:
                same = [one for one in self.pruned if one.dtype == way.dtype]
                how = "As stored" if way.as_stored else f"Decoded to {way.dtype}"
                yield f"{how}, {'it fits as it is.' if way.fits else pruning(same, lambda _way: False)}"
            return
        asked = None if dtype is None else config_dtype(dtype)
        whole, pruned = (
            [way for way in ways if asked in (None, way.dtype)] for ways in (self.whole, self.pruned)
        )
        fitting = [way for way in whole if way.fits]
        if self.whole[0].fits:
            yield "It fits as it is."
        elif fitting:
            yield f"It fits in {fitting[0].dtype}."
        elif self.pruned:
            line = pruning(pruned, lambda way: bool(asked) or not way.as_stored)
            yield line[0].upper() + line[1:]
        else:
            smallest, budget = min(self.whole, key=lambda way: way.needed_bytes), self.budget_bytes or 0
            yield f"It needs {bytes_text(smallest.needed_bytes - budget)} more, in {smallest.dtype}."
            words = ["shrink", checkpoint, "--fit", option_size(budget)]
            yield f"Next, with text of your own: prunecli {shlex.join(words)} --text FILE"


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
                **cls.header([checkpoint]),
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
