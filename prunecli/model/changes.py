"""How the token embeddings of a reduced model differ from the stock ones."""

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ConfigDict


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

    def to_json(self) -> dict[str, Any]:
        """All of them, but for the last two where they are as by default."""
        default = {"shared_blocks": False, "reduction": True}
        return {name: value for name, value in asdict(self).items() if default.get(name) != value}


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

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        """Refuse sides that do not fit each other.

        Raises:
            ValueError: they do not.
        """
        unit, output = self.unit, self.output
        if output is not None and output.tied and (unit is None or unit.map_dim != output.map_dim):
            raise ValueError("an output layer that is tied to a map table which the input has not")

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
        sides = {}
        if self.input is not None:
            sides["input"] = self.input.to_json()
        if self.output is not None:
            sides["output"] = asdict(self.output)
        return sides
