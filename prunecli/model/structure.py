"""`Structure`: how a reduced model differs from its stock architecture; the only place that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prunecli.errors import CheckpointError, kind_and_reason
from prunecli.model.changes import AttentionChange, EmbeddingChange, FfnChange, read_change

VERSION = 3
SECOND = 2
"""Version of a structure without constants in the place of experts."""
FIRST = 1
"""Version of a structure that the first prunecli reads too: of all layers and attentions, with a unit that it knows."""
KEY = "prunecli"
"""Where `Structure` lies in config.json."""

STATISTICS_OF = "statistics_of"
"""In a step of history: the fingerprint of the model whose statistics it went by, where that is another form of its
source."""


@dataclass(frozen=True)
class Structure:
    """What was removed from or shared in a model. Ids are those of the original model, so that reductions compose.

    Attributes:
        experts: sparse layer's name -> ids of the experts it keeps, in the order in which they are stored.
        original_experts: sparse layer's name -> how many experts the original layer had.
        constants: sparse layer's name -> ids, of those that it keeps, of the experts of which a constant is left.
        heads: attention's name -> ids of the heads it keeps, in the order in which they are stored.
        original_heads: attention's name -> how many heads the original attention had.
        attention: attention's name -> whose tensors it runs, or that it is gone; the others are left out. Of one that
            runs another's, `heads` says nothing: they are the other's.
        ffn: FFN's name -> how it differs from the stock one; those that are as config.json says are left out.
        embedding: how the token embeddings differ from the stock ones.
        layers: "encoder" or "decoder" -> original numbers of the layers that it keeps, ascending. Names of layers here
            and of tensors count those that are kept.
        original_layers: the same -> how many layers the original stack had.
        history: what was done, oldest first: {"command", "arguments", "prunecli", "source", "before", "statistics"};
            `before` holds the "parameters" and "bytes" of the source.
    """

    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    original_experts: Mapping[str, int] = field(default_factory=dict)
    constants: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    heads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    original_heads: Mapping[str, int] = field(default_factory=dict)
    attention: Mapping[str, AttentionChange] = field(default_factory=dict)
    ffn: Mapping[str, FfnChange] = field(default_factory=dict)
    embedding: EmbeddingChange = field(default_factory=EmbeddingChange)
    layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    original_layers: Mapping[str, int] = field(default_factory=dict)
    history: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_stock(self) -> bool:
        """Whether nothing was removed, shared, factorised or made of another size."""
        parts = (self.experts, self.constants, self.heads, self.attention, self.ffn, self.layers)
        return not any(parts) and self.embedding.is_stock

    def original_layer(self, side: str, number: int) -> int:
        """The number that a layer of a stack had in the original model."""
        return self.layers[side][number] if side in self.layers else number

    def kept_experts(self, layer: str, num_experts: int) -> tuple[int, ...]:
        """Original ids of the experts that `layer` holds; all of `num_experts` where none was removed."""
        return tuple(self.experts.get(layer, range(num_experts)))

    def keeping_experts(self, kept: Mapping[str, tuple[int, ...]], original: Mapping[str, int]) -> Structure:
        """This structure with `kept` original ids per layer; `original` counts the experts of the original layers."""
        return replace(
            self,
            experts={**self.experts, **{layer: tuple(ids) for layer, ids in kept.items()}},
            original_experts={**original, **self.original_experts},
        )

    def keeping_heads(self, kept: Mapping[str, tuple[int, ...]], original: Mapping[str, int]) -> Structure:
        """This structure with `kept` original ids per attention; `original` counts the heads of the original ones."""
        return replace(
            self,
            heads={**self.heads, **{name: tuple(ids) for name, ids in kept.items()}},
            original_heads={**original, **self.original_heads},
        )

    def changing_ffn(self, changes: Mapping[str, FfnChange]) -> Structure:
        """This structure with `changes` per FFN in the place of what it said of these; an empty one: as stock."""
        merged = {**self.ffn, **changes}
        return replace(self, ffn={name: change for name, change in merged.items() if change != FfnChange()})

    def after(self, step: Mapping[str, object]) -> Structure:
        """This structure with one more step of history."""
        return replace(self, history=(*self.history, dict(step)))

    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the checkpoints that this one was made from, oldest first."""
        values = (step.get("source", {}).get("fingerprint") for step in self.history)
        return tuple(value for value in values if isinstance(value, str))

    @property
    def original_size(self) -> tuple[int, int] | None:
        """(parameters, bytes) of the original model; None if no step of the history states them."""
        first = next((step for step in self.history if step.get("source")), {})
        size = first.get("before")
        return None if size is None else (size["parameters"], size["bytes"])

    def statistics_of(self) -> tuple[str, ...]:
        """Fingerprints of unquantised models whose statistics it, or what it was made from, was pruned by."""
        values = (step.get(STATISTICS_OF) for step in self.history)
        return tuple(value for value in values if isinstance(value, str))

    def to_json(self) -> dict[str, Any]:
        """The value under `"prunecli"` of config.json."""
        layers = {name: list(numbers) for name, numbers in self.layers.items()}
        attention = {name: change.to_json() for name, change in self.attention.items()}
        unit = self.embedding.input
        is_newer = bool(layers or attention) or (unit is not None and unit.is_newer)
        return {
            "version": VERSION if self.constants else SECOND if is_newer else FIRST,
            "experts": {layer: list(ids) for layer, ids in self.experts.items()},
            "original_experts": dict(self.original_experts),
            **(
                {"constants": {name: list(ids) for name, ids in self.constants.items()}}
                if self.constants
                else {}
            ),
            "heads": {name: list(ids) for name, ids in self.heads.items()},
            "original_heads": dict(self.original_heads),
            **({"attention": attention} if attention else {}),
            "ffn": {name: change.to_json() for name, change in self.ffn.items()},
            "embedding": self.embedding.to_json(),
            **({"layers": layers, "original_layers": dict(self.original_layers)} if layers else {}),
            "history": [dict(step) for step in self.history],
        }

    @classmethod
    def from_json(cls, value: Any, where: str = "config.json") -> Structure:
        """Read `to_json`'s value.

        Raises:
            CheckpointError: it is of a newer version, or not of this form.
        """
        try:
            if value["version"] > VERSION:
                raise CheckpointError(
                    f"{where}: its structure has version {value['version']}; this prunecli reads up to {VERSION}",
                    "Install a newer prunecli.",
                )
            return cls(
                experts=_ids(value, "experts"),
                original_experts=_counts(value, "original_experts"),
                constants=_ids(value, "constants"),
                heads=_ids(value, "heads"),
                original_heads=_counts(value, "original_heads"),
                attention={
                    str(name): read_change(AttentionChange, change)
                    for name, change in value.get("attention", {}).items()
                },
                ffn={
                    str(name): change
                    for name, stated in value.get("ffn", {}).items()
                    if (change := read_change(FfnChange, stated)) != FfnChange()
                },
                embedding=EmbeddingChange.from_json(value.get("embedding", {})),
                layers=_ids(value, "layers"),
                original_layers=_counts(value, "original_layers"),
                history=tuple(_step(step) for step in value.get("history", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f'{where}: the value under "{KEY}" is damaged ({kind_and_reason(error)})'
            ) from error


def statistics_files(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The files of statistics that a step of a history went by: {"file", "sha256"} of each."""
    files = step.get("statistics", [])
    return files if isinstance(files, list) else [files]


def _step(value: Mapping[str, Any]) -> dict[str, Any]:
    """A step of the history, whose parts have their form."""
    step = dict(value)
    mappings = (step.get("arguments", {}), step.get("source", {}), *statistics_files(step))
    if not isinstance(step.get("command", ""), str) or not all(isinstance(one, Mapping) for one in mappings):
        raise ValueError("a step of its history has another form")
    if not all(isinstance(text, str) for text in step.get("source", {}).values()):
        raise ValueError("the source of a step of its history is not told in words")
    size = step.get("before", {"parameters": 1, "bytes": 1})
    if any(type(size[key]) is not int or size[key] < 1 for key in ("parameters", "bytes")):
        raise ValueError("a step of its history does not state the size of its source")
    return step


def _ids(value: Mapping[str, Any], key: str) -> dict[str, tuple[int, ...]]:
    return {str(name): tuple(int(number) for number in ids) for name, ids in value.get(key, {}).items()}


def _counts(value: Mapping[str, Any], key: str) -> dict[str, int]:
    return {str(name): int(number) for name, number in value.get(key, {}).items()}
