"""Section 4.3 of 2212.09811, slowly: counts by trying every number, thresholds by lowering theta."""

from collections.abc import Sequence
from fractions import Fraction


def sorted_experts(values: Sequence[float]) -> list[int]:
    """Ids from most to least important, ties by id."""
    return sorted(range(len(values)), key=lambda expert: (-values[expert], expert))


def fixed_per_layer(
    encoder: int, decoder: int, width: int, keep: int, balance: Fraction, least: int, step: int
) -> tuple[int, ...]:
    """Experts per encoder and per decoder layer: the last decoder count, of all that are tried, that fits.

    All counts are multiples of `step`. Without encoder layers there is no balance.
    """
    most = width // step * step
    best = None
    for d in range(width * 20 + 1):
        pair = tuple(max(least, min(most, int(n) // step * step)) for n in (balance * d, d))
        if encoder * pair[0] + decoder * pair[1] <= keep:
            best = pair
    return best


def count_at(theta: Fraction, shares: Sequence[Sequence[Fraction]], minimum: int) -> list[int]:
    """Eq. 5: for each layer the smallest n whose first n shares reach theta, at least `minimum`."""
    counts = []
    for layer in shares:
        ordered = sorted(layer, reverse=True)
        n = next((n for n in range(len(ordered) + 1) if sum(ordered[:n]) >= theta), len(ordered))
        counts.append(max(n, min(minimum, len(ordered))))
    return counts


def global_threshold(
    values: Sequence[Sequence[int]], count: int, minimum: int
) -> tuple[list[int], list[int]]:
    """Experts per layer for the largest theta that keeps at most `count`, and for the next larger theta.

    All arithmetic is exact. Where the first sum is `count`, eq. 5 has this solution; else several layers pass
    the same theta at once, and any choice lies between the two.
    """
    shares = [[Fraction(value, sum(layer)) for value in layer] for layer in values]
    masses = {
        sum(sorted(layer, reverse=True)[:n], Fraction(0)) for layer in shares for n in range(len(layer) + 1)
    }
    below, above = None, None
    for theta in sorted(masses):
        counts = count_at(theta, shares, minimum)
        if sum(counts) <= count:
            below = counts
        elif above is None:
            above = counts
    full = [len(layer) for layer in values]
    return below, above if above is not None else full
