"""Sections 4.1 and 4.2 of 1905.10650, slowly and exactly: heads are removed one by one."""

from collections.abc import Mapping, Sequence
from fractions import Fraction


def remaining(
    model: Mapping[str, Sequence[Fraction]], removed: int, minimum: int
) -> dict[str, tuple[int, ...]]:
    """Heads that are left after `removed` times the least important one went, of layers with more than `minimum`."""
    left = {name: list(range(len(layer))) for name, layer in model.items()}
    for _ in range(removed):
        candidates = [(name, head) for name, heads in left.items() if len(heads) > minimum for head in heads]
        name, head = max(candidates, key=lambda found: (-model[found[0]][found[1]], *place_of(model, *found)))
        left[name].remove(head)
    return {name: tuple(heads) for name, heads in left.items()}


def place_of(model: Mapping[str, Sequence[Fraction]], name: str, head: int) -> tuple[int, int]:
    """Rank of a head: of equal heads the last of their layers go, and of these those of the last layer."""
    own = sorted(range(len(model[name])), key=lambda other: (-model[name][other], other))
    return own.index(head), list(model).index(name)
