"""Shares, sizes in bytes and lists of names, as people write and read them."""

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from prunecli.errors import UsageError


def parse_share(text: str) -> float:
    """Value of --ratio: the share that is written "0.8" or "80%".

    Raises:
        UsageError: not a number, or one that is a share only if it counts in hundredths.
    """
    written = str(text).strip()
    number = written.removesuffix("%").rstrip()
    try:
        value = Decimal(number)
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite():
        raise UsageError("not a number", "Write a fraction or per cent: 0.8 or 80%.")
    if number != written:
        return float(value / 100)
    if 1 < value <= 100:
        raise UsageError("more than everything", f"Write {value / 100} or {value}%.")
    return float(value)


def exact_share(ratio: float, parts: str, usual: float) -> Fraction:
    """The share to remove, as the decimal that a ratio prints as: 0.1 of 30 are 3, not the 4 of binary rounding.

    Args:
        parts: what it is a share of, for the message.
        usual: a ratio that the message explains.

    Raises:
        UsageError: the ratio is outside [0, 1).
    """
    if not 0 <= ratio < 1:
        raise UsageError(
            f"`ratio={ratio:g}` is outside [0, 1).",
            f"It is the fraction of the {parts} to remove: {usual:g} removes {usual:.0%}.",
        )
    return Fraction(repr(float(ratio)))


_UNITS = {"": 1, "b": 1} | {
    prefix + ending: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("ib", 1024), ("i", 1024), ("b", 1000), ("", 1024))
}


def parse_size(text: str) -> int:
    """Bytes of "32GiB" (1024-based), "32GB" (1000-based), "32G" (as 32GiB), "1.5 TiB", "1048576".

    Raises:
        UsageError: not a positive finite size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size < 1:
        raise UsageError("not a size", 'Write it as "30GiB", "512MiB" or a number of bytes.')
    return size


def size_text(count: int) -> str:
    """A size to be typed again as it is, rounded up: "2.61GiB", "640MiB"."""
    if count >= 1 << 30:
        return f"{-(-count * 100 // (1 << 30)) / 100:g}GiB"
    return f"{-(-count // (1 << 20))}MiB"


def option_size(count: int) -> str:
    """At most so many bytes, as an option takes it: 18.7GiB, 512MiB."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        tenths = 10 * count >> power
        if tenths >= 10:
            return f"{tenths / 10:g}{unit}"
    return str(count)


def bytes_text(count: float) -> str:
    """1610612736 -> '1.50 GiB'."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def counted(count: float, name: str) -> str:
    """1, 'pair' -> '1 pair'; 2 -> '2 pairs'."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"
