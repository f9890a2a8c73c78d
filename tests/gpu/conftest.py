"""The card at hand, where there is one, and pretended ones; whichever it is, the tests are the same."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import PurePath
from types import TracebackType

import pytest
import torch

from tests.gpu.pretend import Pretend

HAS_CARD = torch.cuda.is_available()
CARDS = {"V100": (7, 0), "H100": (9, 0)}  # without and with a kernel for grouped products
WARNING = "synchronizing CUDA operation"
TOKENS = torch.tensor([[5, 6, 7, 8, 2], [5, 6, 2, 1, 1]])
REAL = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])


class Real:
    """The first GPU of this machine: its waits are what torch warns of. Copies to it are not counted."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.capability = torch.cuda.get_device_capability(self.device)
        self.uploads = Counter[tuple[str, str]]()
        self._catching = warnings.catch_warnings(record=True)
        self._caught = []

    def __enter__(self) -> Real:
        self._caught = self._catching.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._catching.__exit__(kind, error, trace)

    def reset(self) -> None:
        """Counts and the peak begin anew."""
        self._caught.clear()
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def waits(self) -> Counter[tuple[str, str]]:
        """See `Pretend`."""
        found = [one for one in self._caught if WARNING in str(one.message)]
        return Counter(("wait", f"{PurePath(one.filename).name}:{one.lineno}") for one in found)

    @property
    def peak(self) -> int:
        """See `Pretend`."""
        return torch.cuda.max_memory_allocated(self.device)


@pytest.fixture(params=["real", *CARDS])
def gpu(request, monkeypatch):
    """Each in turn; what is called within its block is counted."""
    if request.param == "real":
        if not HAS_CARD:
            pytest.skip("no GPU here")
        yield Real()
    else:
        pretend = Pretend(CARDS[request.param])
        pretend.patch(monkeypatch)
        yield pretend
