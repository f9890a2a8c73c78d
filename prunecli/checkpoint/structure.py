"""`Structure`: how a reduced model differs from its stock architecture; the only place that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prunecli.errors import CheckpointError

VERSION = 1
KEY = "prunecli"
"""Where `Structure` lies in config.json."""


@dataclass(frozen=True)
class Structure:
    """What was removed from or shared in a model. Ids are those of the original model, so that reductions compose.

    Attributes:
        experts: sparse layer's name -> ids of the experts it keeps, in the order in which they are stored.
        original_experts: sparse layer's name -> how many experts the original layer had.
        heads: attention's name -> ids of the heads it keeps, in the order in which they are stored.
        original_heads: attention's name -> how many heads the original attention had.
        history: what was done, oldest first: {"command", "arguments", "prunecli", "source", "statistics"}.
    """

    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    original_experts: Mapping[str, int] = field(default_factory=dict)
    heads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    original_heads: Mapping[str, int] = field(default_factory=dict)
    history: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_stock(self) -> bool:
        """Whether nothing was removed."""
        return not (self.experts or self.heads)

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

    def after(self, step: Mapping[str, Any]) -> Structure:
        """This structure with one more step of history."""
        return replace(self, history=(*self.history, dict(step)))

    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the checkpoints that this one was made from, oldest first."""
        found = (step.get("source", {}).get("fingerprint") for step in self.history)
        return tuple(value for value in found if isinstance(value, str))

    def to_json(self) -> dict[str, Any]:
        """The value under `"prunecli"` of config.json."""
        return {
            "version": VERSION,
            "experts": {layer: list(ids) for layer, ids in self.experts.items()},
            "original_experts": dict(self.original_experts),
            "heads": {name: list(ids) for name, ids in self.heads.items()},
            "original_heads": dict(self.original_heads),
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
                history=tuple(dict(step) for step in value.get("history", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f'{where}: the value under "{KEY}" is damaged ({error!r})') from error


def _ids(value: Mapping[str, Any], key: str) -> dict[str, tuple[int, ...]]:
    return {str(name): tuple(int(number) for number in ids) for name, ids in value.get(key, {}).items()}


def _counts(value: Mapping[str, Any], key: str) -> dict[str, int]:
    return {str(name): int(number) for name, number in value.get(key, {}).items()}
