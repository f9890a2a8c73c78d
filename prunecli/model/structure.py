"""`Structure`: how a reduced model differs from its stock architecture; the only place that says so."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, PositiveInt, TypeAdapter

from prunecli.errors import CheckpointError, kind_and_reason
from prunecli.model.axes import Kind, Rename, axis_name
from prunecli.model.changes import EmbeddingChange

Value = TypeVar("Value")

VERSION = 4
KEY = "prunecli"
"""Where `Structure` lies in config.json."""

WEIGHTS_KEY = "transformers_weights"
"""The key of config.json under which transformers looks for the name of the file of weights."""

STATISTICS_OF = "statistics_of"
"""In a step of history: the fingerprint of the model whose statistics it went by, where that is another form of its
source."""

KINDS: tuple[Kind, ...] = ("layer", "expert", "head")
"""Of the units whose original ids it keeps."""


def statistics_files(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The files of statistics that a step of a history went by: {"file", "sha256"} of each."""
    files = step.get("statistics", [])
    return files if isinstance(files, list) else [files]


def _step(value: Mapping[str, Any]) -> dict[str, Any]:
    """A step of the history, whose parts have their form; without arguments it has none."""
    step = {**value, "arguments": value.get("arguments", {})}
    mappings = (step["arguments"], step.get("source", {}), *statistics_files(step))
    if not isinstance(step["command"], str) or not all(isinstance(one, Mapping) for one in mappings):
        raise ValueError("a step of its history has another form")
    if not all(isinstance(text, str) for text in step.get("source", {}).values()):
        raise ValueError("the source of a step of its history is not told in words")
    size = step.get("before", {"parameters": 1, "bytes": 1})
    if any(type(size[key]) is not int or size[key] < 1 for key in ("parameters", "bytes")):
        raise ValueError("a step of its history does not state the size of its source")
    return step


Step = Annotated[Mapping[str, Any], AfterValidator(_step)]
"""A step of a history."""


@dataclass(frozen=True)
class KeptUnits:
    """The units that an axis keeps.

    Attributes:
        kept: their ids in the original model, in the order in which they are stored.
        of: how many there were in the original model.
    """

    kept: tuple[int, ...]
    of: int


@dataclass(frozen=True)
class Structure:
    """Removed and shared parts of a model. Ids are those of the original model, so that reductions compose.

    Names of modules count the layers that are kept. An FFN or attention is in at most one of `shared`, `removed` and
    `widths`.

    Attributes:
        axes: name of an axis that lost units, by `axis_name` -> those that it keeps. A shared or removed attention
            has none for its heads: it runs those of its owner, or none.
        shared: FFN or attention -> the one whose tensors it runs; that one has tensors of its own.
        removed: FFNs and attentions that are gone, together with their norms.
        widths: FFN -> how many hidden units it has, where config.json says otherwise.
        constants: sparse layer's name -> ids, of those that it keeps, of the experts of which a constant is left.
        embedding: how the token embeddings differ from the stock ones.
        history: what was done, oldest first: {"command", "arguments", "prunecli", "source", "before", "statistics"};
            `before` holds the "parameters" and "bytes" of the source.
    """

    axes: Mapping[str, KeptUnits] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    widths: Mapping[str, PositiveInt] = field(default_factory=dict)
    constants: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    embedding: EmbeddingChange = field(default_factory=EmbeddingChange)
    history: tuple[Step, ...] = ()

    @property
    def is_stock(self) -> bool:
        """Whether nothing was removed, shared, factorised or made of another size."""
        parts = (self.axes, self.shared, self.removed, self.widths, self.constants)
        return not any(parts) and self.embedding.is_stock

    def units(self, owner: str, kind: Kind, count: int) -> KeptUnits:
        """The units of `owner`; all of `count` where none was removed."""
        return self.axes.get(axis_name(owner, kind)) or KeptUnits(tuple(range(count)), count)

    def original_layer(self, side: str, number: int) -> int:
        """The number that a layer of a stack had in the original model."""
        return self.units(side, "layer", number + 1).kept[number]

    def of_kind(self, kind: Kind) -> dict[str, KeptUnits]:
        """Owner of each axis that lost units of this kind -> those that it keeps."""
        suffix = axis_name("", kind)
        return {
            name.removesuffix(suffix): units for name, units in self.axes.items() if name.endswith(suffix)
        }

    def changing(
        self,
        parts: Collection[str],
        shared: Mapping[str, str],
        removed: Collection[str],
        widths: Mapping[str, int],
    ) -> Structure:
        """This structure whose FFNs or attentions `parts` are shared, removed and wide as given, and else stock."""
        return replace(
            self,
            shared={**{name: owner for name, owner in self.shared.items() if name not in parts}, **shared},
            removed=self.removed.difference(parts).union(removed),
            widths={**{name: width for name, width in self.widths.items() if name not in parts}, **widths},
        )

    def renamed(self, rename: Rename) -> Structure:
        """This structure with other names of modules; what has none is gone."""

        def new(values: Mapping[str, Value]) -> dict[str, Value]:
            return {own: value for name, value in values.items() if (own := rename(name)) is not None}

        others = {
            name: owner
            for name, owner in self.shared.items()
            if name == owner or rename(name) != rename(owner)
        }
        return replace(
            self,
            axes=new(self.axes),
            shared={name: str(rename(owner)) for name, owner in new(others).items()},
            removed=frozenset(new(dict.fromkeys(self.removed))),
            widths=new(self.widths),
            constants=new(self.constants),
        )

    def after(self, step: Mapping[str, Any]) -> Structure:
        """This structure with one more step of history."""
        return replace(self, history=(*self.history, _step(step)))

    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the checkpoints that this one was made from, oldest first.

        That of an unquantised model follows where such a checkpoint was pruned by its statistics.
        """
        values = (
            (step.get("source", {}).get("fingerprint"), step.get(STATISTICS_OF)) for step in self.history
        )
        return tuple(value for value in chain(*values) if isinstance(value, str))

    @property
    def original_size(self) -> tuple[int, int] | None:
        """(parameters, bytes) of the original model; None if no step of the history states them."""
        first = next((step for step in self.history if step.get("source")), {})
        size = first.get("before")
        return None if size is None else (size["parameters"], size["bytes"])

    def to_json(self) -> dict[str, Any]:
        """The value under `"prunecli"` of config.json; what says nothing is left out."""
        value = {
            "axes": {  # in the same order, whichever kind was cut first
                axis_name(owner, kind): {"kept": list(units.kept), "of": units.of}
                for kind in KINDS
                for owner, units in self.of_kind(kind).items()
            },
            "shared": dict(self.shared),
            "removed": sorted(self.removed),
            "widths": dict(self.widths),
            "constants": {name: list(ids) for name, ids in self.constants.items()},
            "embedding": self.embedding.to_json(),
            "history": [dict(step) for step in self.history],
        }
        return {"version": VERSION, **{key: part for key, part in value.items() if part}}

    @classmethod
    def from_json(cls, value: Any, where: str = "config.json") -> Structure:
        """Read `to_json`'s value, or that of an older version.

        Raises:
            CheckpointError: it is of a newer version, or not of this form.
        """
        try:
            if value["version"] > VERSION:
                raise CheckpointError(
                    f"{where}: its structure has version {value['version']}; this prunecli reads up to {VERSION}",
                    "Install a newer prunecli.",
                )
            if value["version"] < VERSION:
                value = _upgraded(value)
            made = TypeAdapter(cls).validate_json(json.dumps(value), strict=True)
            parts = [*made.shared, *made.removed, *made.widths]
            if len(set(parts)) < len(parts):
                raise ValueError("a part is either shared, removed or of another width")
            if not all(name.endswith(tuple(axis_name("", kind) for kind in KINDS)) for name in made.axes):
                raise ValueError("an axis of no known kind")
            return made
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f'{where}: the value under "{KEY}" is damaged ({kind_and_reason(error)})'
            ) from error


def _upgraded(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value of version 1, 2 or 3 as version 4.

    Heads were {"heads": {owner: ids}, "original_heads": {owner: count}}, experts and layers likewise. "attention" and
    "ffn" were {name: change}: {"shared_with": owner}, {"removed": true} or, of an FFN, {"width": hidden units}.
    """
    changes: dict[str, dict[str, Any]] = {"shared_with": {}, "removed": {}, "width": {}}
    for part in ("attention", "ffn"):
        for name, change in old.get(part, {}).items():
            ((key, given),) = change.items()
            changes[key][name] = given
    return {
        **old,
        "axes": {
            axis_name(owner, kind): {"kept": ids, "of": old[f"original_{kind}s"][owner]}
            for kind in KINDS
            for owner, ids in old.get(f"{kind}s", {}).items()
        },
        "shared": changes["shared_with"],
        "removed": [name for name, given in changes["removed"].items() if given],
        "widths": changes["width"],
    }
