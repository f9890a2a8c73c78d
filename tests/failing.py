"""Functions that fail after a while."""

import errno
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any
from unittest.mock import DEFAULT, Mock

FULL = OSError(errno.ENOSPC, "No space left on device")


def failing_after(calls: int, real: Callable[..., Any], error: BaseException = FULL) -> Mock:
    """`real`, until it was called so many times; from then on the error is raised."""
    return Mock(wraps=real, side_effect=chain(repeat(DEFAULT, calls), repeat(error)))
