"""What a decision says of its components, slowly: ranks by counting, the cut-off by looking at every one."""

from collections.abc import Sequence


def rank(values: Sequence[float], kept: Sequence[bool], at: int) -> int:
    """1 + how many are higher, or as high and before it: what stays before what goes, then by place."""
    own = (-values[at], not kept[at], at)
    both = zip(values, kept, strict=True)
    return 1 + sum((-value, not stays, place) < own for place, (value, stays) in enumerate(both))


def cutoff(values: Sequence[float], kept: Sequence[bool]) -> float | None:
    """The least value that stays and that none which goes exceeds; None: nothing goes, or nothing so stays."""
    gone = [value for value, stays in zip(values, kept, strict=True) if not stays]
    staying = [
        v for v, stays in zip(values, kept, strict=True) if stays and all(v >= other for other in gone)
    ]
    return min(staying) if gone and staying else None
