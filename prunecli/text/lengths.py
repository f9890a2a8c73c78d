"""How long a translation may get."""

from __future__ import annotations

LENGTH_FACTOR = 3
LENGTH_MARGIN = 50
"""An output ends at 3 x source tokens + 50 at the latest: generous also where a script costs more tokens."""


def length_limit(source_tokens: int, max_positions: int | None) -> int:
    """New tokens at most for a source of so many tokens: min(3 x source + 50, positions of the model - 1)."""
    limit = LENGTH_FACTOR * source_tokens + LENGTH_MARGIN
    return limit if max_positions is None else min(limit, max_positions - 1)
