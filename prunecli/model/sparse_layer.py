"""A layer of a mixture of experts, as the checkpoint holds it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil

from prunecli.architectures.records import Side

CONSTANT = "approx_value"
"""Below an expert's name: the constant, `[width]`, that stands for its output, as vLLM knows it (2507.00390, MoNE)."""


@dataclass(frozen=True)
class Groups:
    """Groups of experts, of which the router first chooses some.

    Attributes:
        count: how many there are, one after another, each with the same number of experts.
        chosen: how many the router chooses for a token.
        least: experts that each must have.
    """

    count: int = 1
    chosen: int = 1
    least: int = 1

    def needed(self, top_k: int) -> int:
        """Number of experts that a layer needs so that its router can pick `top_k` for each token.

        The router picks the best `chosen` groups first, then experts of these groups alone.
        """
        return self.count * max(self.least, ceil(top_k / self.chosen))


@dataclass(frozen=True)
class SparseLayer:
    """A layer whose FFN is a mixture of experts.

    Attributes:
        name: of the FFN, "model.encoder.layers.3.ffn".
        side: of which stack.
        layer: its number in the stack.
        num_experts: how many this checkpoint holds.
        expert_prefix: name of one expert, "{expert}" for its number in this checkpoint.
        expert_tensors: an expert's tensors, relative to it: "fc1.weight"; none where all experts are stacked.
        router_tensors: full names; their first axis is the expert.
        experts: original ids of the experts, in the order in which they are stored.
        original_experts: how many experts the original layer had.
        top_k: experts that the router picks for a token.
        cut: full names of the tensors with an entry for each expert, the router's among them -> the axis on which
            these lie.
        stacked_tensors: those of them that hold parts of experts.
        groups: those of the experts; one where the router knows none.
        is_predicting: whether its layer predicts further tokens, which no plain forward pass runs.
        constants: numbers of the experts of which a constant is left; the router still picks them.
    """

    name: str
    side: Side
    layer: int
    num_experts: int
    expert_prefix: str
    expert_tensors: tuple[str, ...]
    router_tensors: tuple[str, ...]
    experts: tuple[int, ...]
    original_experts: int
    top_k: int = 2
    cut: Mapping[str, int] = field(default_factory=dict)
    stacked_tensors: tuple[str, ...] = ()
    groups: Groups = Groups()
    is_predicting: bool = False
    constants: tuple[int, ...] = ()

    @property
    def computed(self) -> tuple[int, ...]:
        """Numbers of the experts that are no constants."""
        return tuple(number for number in range(self.num_experts) if number not in self.constants)

    def expert_tensor(self, expert_index: int, suffix: str) -> str:
        """Full name of a tensor of the expert that is stored as number `expert_index`."""
        return f"{self.expert_prefix.format(expert=expert_index)}.{suffix}"


def parts_of(layers: Iterable[SparseLayer]) -> Iterator[tuple[str, str]]:
    """Full name of each tensor of experts and routers -> what it is counted under."""
    for layer in layers:
        for name in layer.cut:
            yield name, "experts" if name in layer.stacked_tensors else "router"
        for number in layer.constants:
            yield layer.expert_tensor(number, CONSTANT), "experts"
        for number in layer.computed:
            for suffix in layer.expert_tensors:
                yield layer.expert_tensor(number, suffix), "experts"
