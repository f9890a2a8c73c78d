"""Arrays of numbers in JSON files, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError

LARGEST = 1e15
"""No figure of a result is larger; a chart of larger ones would overflow."""
MOST = 10**18
"""No count of a result is larger."""


def checked_array(
    value: Any,
    shape: tuple[int, ...],
    where: str,
    *,
    counts: bool = False,
    signed: bool = False,
    remedy: str = "Collect the statistics again.",
) -> NDArray[Any]:
    """A finite array of `shape` from JSON, not negative unless `signed`; int64 for `counts`, else float64.

    Its numbers are no larger than `LARGEST`, or `MOST`.

    Raises:
        StatisticsError: naming `where`.
    """
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise StatisticsError(f"{where} is not an array of numbers.", remedy) from error
    if array.shape != shape:
        needed, held = (" x ".join(map(str, s)) or "one number" for s in (shape, array.shape))
        raise StatisticsError(f"{where} holds {held} values; {needed} are needed.", remedy)
    if not np.isfinite(array).all():
        raise StatisticsError(f"{where} holds NaN or infinity.", remedy)
    if (np.abs(array) > (MOST if counts else LARGEST)).any():
        raise StatisticsError(f"{where} holds {'counts' if counts else 'values'} that no run gives.", remedy)
    if not signed and (array < 0).any():
        raise StatisticsError(f"{where} holds negative values.", remedy)
    if not counts:
        return array
    whole = np.asarray(value)
    if whole.dtype.kind not in "iu" and (array != np.floor(array)).any():
        raise StatisticsError(f"{where} holds fractions; counts are whole.", remedy)
    return whole.astype(np.int64)
