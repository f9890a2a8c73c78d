"""How the token embeddings of a model differ from the stock ones, a side at a time: a part of `Structure`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

Side = TypeVar("Side", "InputChange", "OutputChange")


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
    """

    kind: str
    map_dim: int
    expand_dim: int = 0
    depth: int = 0
    max_groups: int = 0
    zero_padding: bool = False
    cached: bool = False


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
        sides = {"input": self.input, "output": self.output}
        return {name: asdict(side) for name, side in sides.items() if side is not None}

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


def _read(kind: type[Side], value: Any) -> Side | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TypeError(f"unknown change of the embeddings: {value!r}")
    kinds = {"kind": str, "zero_padding": bool, "cached": bool, "tied": bool}
    for field in fields(kind):
        given = value.get(field.name, field.default)
        is_none = given is None and field.default is None
        if not is_none and type(given) is not kinds.get(field.name, int):
            raise TypeError(f"embeddings: {field.name} is {given!r}")
    return kind(**value)
