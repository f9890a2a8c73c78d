"""`Structure`: how a reduced model differs from its stock architecture; the only place that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from prunecli.errors import CheckpointError

VERSION = 2
FIRST = 1
"""Version of a structure that the first prunecli reads too: of all layers and attentions, with a unit that it knows."""
KEY = "prunecli"
"""Where `Structure` lies in config.json."""

Side = TypeVar("Side", "InputChange", "OutputChange")


@dataclass(frozen=True)
class FfnChange:
    """How one FFN differs from the stock one. At most one of the three is given; none: it is the stock one again.

    Attributes:
        shared_with: name of the FFN whose tensors it runs; that one has tensors of its own.
        removed: whether it is gone, together with its norm.
        width: hidden units that it has, of those that it shares with others too.

    Raises:
        ValueError: more than one of them, or a width below 1.
    """

    shared_with: str | None = None
    removed: bool = False
    width: int | None = None

    def __post_init__(self) -> None:
        if (self.shared_with is not None) + self.removed + (self.width is not None) > 1:
            raise ValueError("an FFN is either shared, removed or of another width")
        if self.width is not None and self.width < 1:
            raise ValueError(f"an FFN of width {self.width}")

    def to_json(self) -> dict[str, Any]:
        """What is given of the three."""
        values = {
            "shared_with": self.shared_with,
            "removed": self.removed or None,
            "width": self.width,
        }
        return {key: value for key, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FfnChange:
        """Read `to_json`'s value.

        Raises:
            TypeError, ValueError: it is not of this form.
        """
        if not isinstance(value, dict) or not set(value) <= {"shared_with", "removed", "width"}:
            raise ValueError(f"unknown change of an FFN: {value!r}")
        owner, removed, width = value.get("shared_with"), value.get("removed", False), value.get("width")
        kinds = (
            isinstance(owner, (str, type(None))),
            type(removed) is bool,
            width is None or type(width) is int,
        )
        if not all(kinds):
            raise TypeError(f"unknown change of an FFN: {value!r}")
        return cls(owner, removed, width)


@dataclass(frozen=True)
class AttentionChange:
    """How one attention differs from the stock one, but for its heads. At most one of both is given.

    Attributes:
        shared_with: name of the attention whose tensors it runs; that one has tensors of its own.
        removed: whether it is gone, together with its norms.

    Raises:
        ValueError: both are given.
    """

    shared_with: str | None = None
    removed: bool = False

    def __post_init__(self) -> None:
        if self.shared_with is not None and self.removed:
            raise ValueError("an attention is either shared or removed")

    def to_json(self) -> dict[str, Any]:
        """What is given of both."""
        return {"removed": True} if self.removed else {"shared_with": self.shared_with}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AttentionChange:
        """Read `to_json`'s value.

        Raises:
            ValueError: it is not of this form.
        """
        owner = value.get("shared_with")
        if value != {"removed": True} and not (isinstance(owner, str) and len(value) == 1):
            raise ValueError(f"unknown change of an attention: {value!r}")
        return cls(owner, removed=owner is None)


@dataclass(frozen=True)
class InputChange:
    """The DeFINE unit in the place of the input table (see `prunecli.model.define.UnitShape`).

    Attributes:
        kind: of the unit.
        map_dim: n.
        expand_dim: k; 0 where nothing is expanded.
        depth: expansion layers N; 0 where nothing is expanded.
        max_groups: g_max; 0 where nothing is expanded.
        zero_padding: whether the row of the padding token is zero, whatever the unit makes of its map vector.
        cached: whether the rows that the unit makes are stored in its place: an ordinary table.
        shared_blocks: whether all groups of a layer share one block of weights.
        reduction: whether a linear layer reduces k to m.
    """

    kind: str
    map_dim: int
    expand_dim: int = 0
    depth: int = 0
    max_groups: int = 0
    zero_padding: bool = False
    cached: bool = False
    shared_blocks: bool = False
    reduction: bool = True

    @property
    def is_newer(self) -> bool:
        """Whether it is a unit that the first prunecli does not know."""
        return self.shared_blocks or not self.reduction

    def to_json(self) -> dict[str, Any]:
        """All but what the first prunecli does not know, where that is as ever."""
        since = {"shared_blocks": False, "reduction": True}
        return {name: value for name, value in asdict(self).items() if since.get(name) != value}


@dataclass(frozen=True)
class OutputChange:
    """The output layer, where it is not the stock one.

    Attributes:
        map_dim: n of logits (h P) U^T with a table U [V, n]; None: a stock table of its own, in a model whose config
            says that it is the input's.
        tied: whether U is the map table of the input's unit.
    """

    map_dim: int | None = None
    tied: bool = False


@dataclass(frozen=True)
class EmbeddingChange:
    """Both sides; None: as in the stock model."""

    input: InputChange | None = None
    output: OutputChange | None = None

    @property
    def unit(self) -> InputChange | None:
        """The input's unit, where it runs: a cached one is a table again."""
        return None if self.input is None or self.input.cached else self.input

    @property
    def is_stock(self) -> bool:
        """Whether the model is an ordinary one."""
        return self.unit is None and self.output is None

    def to_json(self) -> dict[str, Any]:
        """The sides that differ."""
        sides: dict[str, Any] = {}
        if self.input is not None:
            sides["input"] = self.input.to_json()
        if self.output is not None:
            sides["output"] = asdict(self.output)
        return sides

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EmbeddingChange:
        """Read `to_json`'s value.

        Raises:
            TypeError, ValueError: it is not of this form.
        """
        if not isinstance(value, dict) or not set(value) <= {"input", "output"}:
            raise ValueError(f"unknown change of the embeddings: {value!r}")
        made = cls(_read(InputChange, value.get("input")), _read(OutputChange, value.get("output")))
        unit, output = made.unit, made.output
        if output is not None and output.tied and (unit is None or unit.map_dim != output.map_dim):
            raise ValueError("an output layer that is tied to a map table which the input has not")
        return made


@dataclass(frozen=True)
class Structure:
    """What was removed from or shared in a model. Ids are those of the original model, so that reductions compose.

    Attributes:
        experts: sparse layer's name -> ids of the experts it keeps, in the order in which they are stored.
        original_experts: sparse layer's name -> how many experts the original layer had.
        heads: attention's name -> ids of the heads it keeps, in the order in which they are stored.
        original_heads: attention's name -> how many heads the original attention had.
        attention: attention's name -> whose tensors it runs, or that it is gone; the others are left out. Of one that
            runs another's, `heads` says nothing: they are the other's.
        ffn: FFN's name -> how it differs from the stock one; those that are as config.json says are left out.
        embedding: how the token embeddings differ from the stock ones.
        layers: "encoder" or "decoder" -> original numbers of the layers that it keeps, ascending. Names of layers here
            and of tensors count those that are kept.
        original_layers: the same -> how many layers the original stack had.
        history: what was done, oldest first: {"command", "arguments", "prunecli", "source", "statistics"}.
    """

    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    original_experts: Mapping[str, int] = field(default_factory=dict)
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
        parts = (self.experts, self.heads, self.attention, self.ffn, self.layers)
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

    def after(self, step: Mapping[str, Any]) -> Structure:
        """This structure with one more step of history."""
        return replace(self, history=(*self.history, dict(step)))

    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the checkpoints that this one was made from, oldest first."""
        values = (step.get("source", {}).get("fingerprint") for step in self.history)
        return tuple(value for value in values if isinstance(value, str))

    def to_json(self) -> dict[str, Any]:
        """The value under `"prunecli"` of config.json."""
        layers = {name: list(numbers) for name, numbers in self.layers.items()}
        attention = {name: change.to_json() for name, change in self.attention.items()}
        unit = self.embedding.input
        is_newer = bool(layers or attention) or (unit is not None and unit.is_newer)
        return {
            "version": VERSION if is_newer else FIRST,
            "experts": {layer: list(ids) for layer, ids in self.experts.items()},
            "original_experts": dict(self.original_experts),
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
                heads=_ids(value, "heads"),
                original_heads=_counts(value, "original_heads"),
                attention={
                    str(name): AttentionChange.from_json(change)
                    for name, change in value.get("attention", {}).items()
                },
                ffn=_changes(value.get("ffn", {})),
                embedding=EmbeddingChange.from_json(value.get("embedding", {})),
                layers=_ids(value, "layers"),
                original_layers=_counts(value, "original_layers"),
                history=tuple(dict(step) for step in value.get("history", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f'{where}: the value under "{KEY}" is damaged ({error!r})') from error


def _ids(value: Mapping[str, Any], key: str) -> dict[str, tuple[int, ...]]:
    return {str(name): tuple(int(number) for number in ids) for name, ids in value.get(key, {}).items()}


def _changes(value: Mapping[str, Any]) -> dict[str, FfnChange]:
    changes = {str(name): FfnChange.from_json(change) for name, change in value.items()}
    return {name: change for name, change in changes.items() if change != FfnChange()}


def _counts(value: Mapping[str, Any], key: str) -> dict[str, int]:
    return {str(name): int(number) for name, number in value.get(key, {}).items()}


def _read(kind: type[Side], value: Any) -> Side | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TypeError(f"unknown change of the embeddings: {value!r}")
    for attribute in fields(kind):
        given = value.get(attribute.name, attribute.default)
        is_none = given is None and attribute.default is None
        expected = {"str": str, "bool": bool}.get(str(attribute.type), int)
        if not is_none and type(given) is not expected:
            raise TypeError(f"embeddings: {attribute.name} is {given!r}")
    return kind(**value)
