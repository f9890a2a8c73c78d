"""Files of the hub that are read by ranges, at one commit; huggingface_hub tries failed requests again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from prunecli.errors import HubError
from prunecli.tensors.hub.failures import describe, download, host, one_line, reason
from prunecli.tensors.hub.names import HubName
from prunecli.tensors.reader import Fill

TRIES, LONGEST_WAIT = 8, 60
"""Number of further tries of a request, and the most seconds before one unless the server asks for more."""

PIECE_BYTES = 32 << 20
"""Most bytes of one request."""

GO_ON = "Start the same command again; with --stream it goes on from what is fetched."


@dataclass
class Traffic:
    """Counts what many threads receive for some files.

    Attributes:
        received: bytes of weights and headers of files, without HTTP's own.
        requests: number of answers.
    """

    received: int = 0
    requests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, received: int) -> None:
        """Add a request and its bytes."""
        with self._lock:
            self.received += received
            self.requests += 1


class RemoteFile:
    """A file of a model at one commit, a `RangeSource`. Threads may read side by side.

    Each request goes to the address that the hub sent the last one to, as long as that is good: huggingface_hub's file
    system asks the hub for every range, which limits the number of such requests in five minutes.

    Args:
        name: the model.
        commit: hash of the commit.
        file: name of the file in the model.
        size: bytes, as the hub said.
        traffic: counts the bytes that come.
    """

    def __init__(self, name: HubName, commit: str, file: str, size: int, traffic: Traffic) -> None:
        self.name = name
        self.commit = commit
        self.file = file
        self.size = size
        self.traffic = traffic
        self._address: str | None = None

    def reading(self, offset: int, nbytes: int) -> Fill:
        """Return a function that fills buffers with the next of `nbytes` from `offset` on.

        Raises:
            HubError: (by the function) they cannot be read, or are not those of this file.
        """
        stop, rest = offset + nbytes, memoryview(b"")

        def fill(view: memoryview) -> None:
            nonlocal offset, rest
            while len(view):
                if not rest:
                    rest = memoryview(self._received(offset, min(offset + PIECE_BYTES, stop)))
                    offset += len(rest)
                count = min(len(rest), len(view))
                view[:count] = rest[:count]
                view, rest = view[count:], rest[count:]

        return fill

    def _received(self, start: int, stop: int) -> bytes:
        """The bytes from `start` on, up to `stop` or fewer."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        own = hf_hub_url(self.name.repo, self.file, revision=self.commit)
        url = self._address or own
        # The token goes to the hub alone, not to where it has its large files.
        headers = build_hf_headers(token=None if url == own else False, library_name="prunecli")
        headers |= {"Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}
        options = {"max_retries": TRIES, "max_wait_time": LONGEST_WAIT}
        try:
            response = http_backoff(
                "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, **options
            )
            if url != own and 400 <= response.status_code < 500:  # the address was good for a while
                self._address = None
                return self._received(start, stop)
            hf_raise_for_status(response)
        except Exception as error:
            if describe(self.name, error) is None:
                raise
            raise HubError(f"{self.name}: {self.file}: {reason(error)} ({one_line(error)})", GO_ON) from error
        answered = f"{response.status_code} {response.headers.get('Content-Range')}"
        if not answered.startswith(f"206 bytes {start}-"):
            raise HubError(
                f"{self.name}: {self.file}: {host()} answers {answered}, not with the range of bytes",
                f"Fetch the model whole: {download(self.name)}",
            )
        if response.url.host != urlsplit(own).hostname:
            self._address = str(response.url)
        self.traffic.count(len(response.content))
        return bytes(response.content)
