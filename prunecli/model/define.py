"""The dimensions of a DeFINE unit (1911.12385, 3.1 to 3.3 and A.2): widths, groups, tensors, parameters; no torch.

The paper fixes the first and the last width and the groups; the rest is chosen here:

- The output of layer l has the width n + l (k - n) / N, rounded to the nearest multiple of every number of groups
  that the unit uses (the paper assumes that it divides); the last is k itself. Residual connections need equal
  widths: k / 2 everywhere, as in 4.4.
- Every layer and the reduction have a bias. The parameters that the paper's tables count do not follow from its text,
  with biases or without (docs/reference/commands/factorize-embeddings.md).
- Without the reduction (Table 8b) the last layer itself makes the m values.
"""

from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod
from typing import Literal, get_args

from prunecli.errors import UsageError

UnitKind = Literal[
    "define",
    "hgt-no-mixing",
    "hgt-residual",
    "hgt-no-skip",
    "group-linear-shuffle",
    "group-linear",
    "linear",
    "projective",
]
UNIT_KINDS: tuple[UnitKind, ...] = get_args(UnitKind)
"""DeFINE and the ablations of Tables 6 to 8: without split and mix, residual connections instead of the skip
connection, neither, a fixed number of groups with and without a shuffle between the layers, one group, and no
expansion at all (n to m, the projective embedding of Dai et al.)."""
SKIPPING = frozenset({"define", "hgt-no-mixing"})
"""The kinds whose layers l > 1 also read the map vector e."""


@dataclass(frozen=True)
class GroupLayer:
    """One group transformation: `inputs` values in `groups` equal parts, each multiplied by its own block.

    With `shared`, all parts are multiplied by the same one.
    """

    inputs: int
    outputs: int
    groups: int
    shared: bool

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """[blocks, inputs / groups, outputs / groups]."""
        blocks = 1 if self.shared else self.groups
        return blocks, self.inputs // self.groups, self.outputs // self.groups

    @property
    def weights(self) -> int:
        """n_l k_l / g_l (Figure 2d); with one block for all groups (A.1) n_l k_l / g_l^2."""
        return prod(self.weight_shape)

    @property
    def parameters(self) -> int:
        """The weights and the bias."""
        return self.weights + self.outputs


@dataclass(frozen=True)
class UnitShape:
    """Every dimension of a unit. `projective` has neither `expand_dim` nor `depth` nor groups: they are not read.

    Attributes:
        vocabulary: rows V of the table.
        map_dim: width n of the map table, m at most.
        model_dim: width m of the model, to which the unit reduces.
        expand_dim: width k of the last expansion layer (twice it, with residual connections).
        depth: expansion layers N.
        max_groups: g_max, the groups of the first layer; layer l has max(floor(g_max / 2^(l-1)), 1).
        kind: of the transformation.
        shared_blocks: one block of weights for all groups of a layer, as A.1 writes it, and not one for each, as
            Figure 2d counts them.
        reduction: whether a linear layer reduces k to m; without it the last layer makes the m values (Table 8b).

    Raises:
        UsageError: dimensions that no unit can have, or that its groups do not divide.
    """

    vocabulary: int
    map_dim: int
    model_dim: int
    expand_dim: int = 0
    depth: int = 3
    max_groups: int = 4
    kind: UnitKind = "define"
    shared_blocks: bool = False
    reduction: bool = True

    def __post_init__(self) -> None:
        if self.kind not in UNIT_KINDS:
            raise UsageError(f"{self.kind!r} is no kind of unit", f"Give one of {', '.join(UNIT_KINDS)}.")
        if self.vocabulary < 1:
            raise UsageError(f"The vocabulary is {self.vocabulary}", "Give a table that has rows.")
        if self.map_dim < 1:
            raise UsageError(f"The map dimension is {self.map_dim}", "Give `map_dim` above 0.")
        if self.map_dim > self.model_dim:
            raise UsageError(
                f"The map dimension {self.map_dim} is above the model's width {self.model_dim}: "
                "the table would grow",
                f"Give `map_dim={self.model_dim}` or less.",
            )
        if self.kind != "projective":
            self._check_expansion()
        elif self.shared_blocks or not self.reduction:
            raise UsageError(
                "A projective embedding is a reduction alone: it has no layers to share blocks or to end with",
                "Leave out `shared_blocks` and `reduction=False`, or choose another `kind`.",
            )

    def _check_expansion(self) -> None:
        if self.depth < 1:
            raise UsageError(f"The depth is {self.depth}", "Give `depth=1` or more.")
        if self.max_groups < 1:
            raise UsageError(f"The number of groups is {self.max_groups}", "Give `max_groups=1` or more.")
        halves = 2 if self.kind == "hgt-residual" else 1
        if not self.reduction and self.expand_dim != halves * self.model_dim:
            raise UsageError(
                f"Without the reduction the last layer makes the model's {self.model_dim} values: "
                f"the expansion dimension is {halves * self.model_dim}, not {self.expand_dim}",
                f"Give `expand_dim={halves * self.model_dim}`, or leave it out.",
            )
        if self.expand_dim < halves * self.map_dim:
            twice = "twice " if halves == 2 else ""
            raise UsageError(
                f"The expansion dimension {self.expand_dim} is below {twice}the map dimension {self.map_dim}",
                f"Give `expand_dim={halves * self.map_dim}` or more.",
            )
        self._check_divides("map", self.map_dim, self.group_multiple)
        divisor = 2 * self.group_multiple if halves == 2 else self.groups[-1]
        self._check_divides("expansion", self.expand_dim, divisor)

    def _check_divides(self, name: str, value: int, divisor: int) -> None:
        if value % divisor:
            option = "`map_dim`" if name == "map" else "`expand_dim`"
            below, above = value // divisor * divisor, -(-value // divisor) * divisor
            nearest = f"{below} or {above}" if below else f"{above}"
            raise UsageError(
                f"The {name} dimension {value} cannot be split: with {self.max_groups} groups and {self.depth} "
                f"layers it must be a multiple of {divisor}",
                f"Give {option} {nearest}, or fewer `max_groups`.",
            )

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """g_l of every expansion layer (3.2)."""
        if self.kind == "projective":
            return ()
        if self.kind == "linear":
            return (1,) * self.depth
        if self.kind in ("group-linear", "group-linear-shuffle"):
            return (self.max_groups,) * self.depth
        return tuple(max(self.max_groups >> layer, 1) for layer in range(self.depth))

    @property
    def group_multiple(self) -> int:
        """Number that the map dimension and every inner width are multiples of."""
        return lcm(*self.groups)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Output width of every expansion layer; never falls, and ends with `expand_dim` (residual: half of it)."""
        if self.kind == "projective":
            return ()
        if self.kind == "hgt-residual":
            return (self.expand_dim // 2,) * self.depth
        unit, most = self.group_multiple, self.expand_dim // self.group_multiple
        span = self.expand_dim - self.map_dim
        steps = range(1, self.depth)
        # The nearest multiple of `unit` to n + l (k - n) / N, halves upwards, in whole numbers.
        rounded = (
            (2 * (self.map_dim * self.depth + step * span) + unit * self.depth) // (2 * unit * self.depth)
            for step in steps
        )
        return (*(min(multiple, most) * unit for multiple in rounded), self.expand_dim)

    @cached_property
    def layers(self) -> tuple[GroupLayer, ...]:
        """The expansion layers. Where the kind has the skip connection, those after the first also read e."""
        layers = []
        width = self.map_dim
        for number, (outputs, groups) in enumerate(zip(self.widths, self.groups, strict=True)):
            inputs = width + self.map_dim if number and self.kind in SKIPPING else width
            layers.append(GroupLayer(inputs, outputs, groups, self.shared_blocks))
            width = outputs
        return tuple(layers)

    @property
    def features(self) -> int:
        """Width of the expansion, which is reduced to m: the last width, or n where nothing is expanded."""
        return self.widths[-1] if self.widths else self.map_dim

    @property
    def unit_parameters(self) -> int:
        """All but the map table: sum of n_l k_l / g_l + k_l over the layers, and (k + 1) m of the reduction."""
        reduced = (self.features + 1) * self.model_dim if self.reduction else 0
        return sum(layer.parameters for layer in self.layers) + reduced

    @property
    def parameters(self) -> int:
        """The map table, the layers, the reduction."""
        return self.vocabulary * self.map_dim + self.unit_parameters

    @property
    def table_parameters(self) -> int:
        """V m: the table that the unit replaces."""
        return self.vocabulary * self.model_dim

    @property
    def output_parameters(self) -> int:
        """n m: the projection of hidden states where the output layer is tied to the map table."""
        return self.map_dim * self.model_dim

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name relative to the unit -> shape of every tensor that a checkpoint of it holds."""
        shapes: dict[str, tuple[int, ...]] = {"map.weight": (self.vocabulary, self.map_dim)}
        for number, layer in enumerate(self.layers):
            shapes[f"layers.{number}.weight"] = layer.weight_shape
            shapes[f"layers.{number}.bias"] = (layer.outputs,)
        if self.reduction:
            shapes["reduce.weight"] = (self.model_dim, self.features)
            shapes["reduce.bias"] = (self.model_dim,)
        return shapes
