"""What Python reads as JSON and no file should hold: halves of surrogate pairs, NaN and infinity."""

from __future__ import annotations

import json
import re
from typing import Any

LONE = "half a surrogate pair"
_LONE = re.compile("[\ud800-\udfff]")


def has_lone_surrogates(value: Any) -> bool:
    """Whether any text in a JSON value, names included, could not be written as UTF-8."""
    return _LONE.search(json.dumps(value, ensure_ascii=False)) is not None


def is_finite(value: Any) -> bool:
    """Whether all numbers of a JSON value are: Python reads `NaN`, `Infinity` and `1e999`, JSON has none of them."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def escaped(text: str) -> str:
    """JSON text in which such halves, as names of files may give them, are written as escapes."""
    return _LONE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
