"""What comes over the wire, counted for many threads, which it can have end."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from prunecli.errors import HubError


@dataclass
class Traffic:
    """What came over the wire for some files, and whether it is to end.

    Attributes:
        received: bytes of weights and headers of files; those of HTTP itself are not counted.
        requests: that were answered with a range.
    """

    received: int = 0
    requests: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stop(self) -> None:
        """Have every request end at its next piece, and none begin."""
        self._stopped.set()

    def wait(self, seconds: float) -> None:
        """As `time.sleep`, but that `stop` ends it.

        Raises:
            HubError: it was stopped.
        """
        if self._stopped.wait(seconds):
            raise HubError("the reading was stopped")

    def count(self, received: int, requests: int = 0) -> None:
        """Add to both."""
        with self._lock:
            self.received += received
            self.requests += requests
