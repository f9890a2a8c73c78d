"""Names in little room: what tells them apart stays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_BEGUN = re.compile(r"(\d+\.)?\w*$")
"""A word or number at the end, of which the rest may differ."""


def told_apart(names: Iterable[str], letters: int) -> dict[str, str]:
    """Name -> it, or where it is longer than `letters` a shorter form of its own.

    What all long ones begin with goes first, then what they end with, in whole words; then the middle of what is still
    too long, as far as no two become alike.
    """
    whole = list(dict.fromkeys(names))
    long = [name for name in whole if len(name) > letters]
    shared = long if len(long) > 1 else []
    front = len(_BEGUN.sub("", _common(shared)))
    back = len(_BEGUN.sub("", _common([name[::-1] for name in shared])))
    for room in range(letters, max(map(len, long), default=letters)):
        short = {
            name: _cut(_without(name, front, back, room), room) if name in long else name for name in whole
        }
        if len(set(short.values())) == len(whole):
            return short
    return {name: name for name in whole}


def _common(names: Sequence[str]) -> str:
    """What all begin with."""
    first, last = min(names, default=""), max(names, default="")
    end = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    return first[:end]


def _without(name: str, front: int, back: int, letters: int) -> str:
    """`name` without its beginning, and if that is not enough without its end."""
    text = f"…{name[front:]}" if front > 1 else name
    return f"{text[:-back]}…" if len(text) > letters and 1 < back < len(text) - 1 else text


def _cut(text: str, letters: int) -> str:
    """`text`, or its beginning and its end."""
    half = (letters - 1) // 2
    return text if len(text) <= letters else f"{text[: letters - 1 - half]}…{text[-half:]}"
