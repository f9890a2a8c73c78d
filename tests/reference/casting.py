"""Rounding to a small binary floating-point type, restated in exact fractions."""

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """A binary format: bits of the fraction, exponent of the least normal number, largest value."""

    fraction_bits: int
    least_exponent: int
    largest: float


FORMATS = {
    "F16": Format(10, -14, 65504.0),
    "BF16": Format(7, -126, float(Fraction(2**8 - 1, 2**7) * 2**127)),
    "F32": Format(23, -126, float(Fraction(2**24 - 1, 2**23) * 2**127)),
    "F64": Format(52, -1022, math.ldexp(2 - 2**-52, 1023)),
}


def rounded(value: float, dtype: str) -> float:
    """The nearest value of the format, ties to the even one; infinite where it lies past the largest by half a step."""
    if value == 0:
        return value
    form, exact = FORMATS[dtype], Fraction(value)
    exponent = max(math.frexp(value)[1] - 1, form.least_exponent)
    step = Fraction(2) ** (exponent - form.fraction_bits)
    made = round(exact / step) * step  # Fraction's round is to even
    if abs(made) > Fraction(form.largest):
        return math.copysign(math.inf, value)
    return math.copysign(float(made), value)
