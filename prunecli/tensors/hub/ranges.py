"""Files of the hub that are read by ranges, at one commit; requests that fail are tried again."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from prunecli.errors import HubError
from prunecli.tensors.hub.failures import describe, download, is_unreachable, one_line
from prunecli.tensors.hub.names import HubName
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.reader import Fill

WAITS = (0.5, 1, 2, 4, 8, 16, 32, 60)
"""Seconds before each further try of a request."""

LONGEST_WAIT = 600
"""Seconds that a server may ask to wait."""

PIECE_BYTES = 32 << 20
"""Most bytes of one request."""

GO_ON = "Start the same command again; with `stream` it goes on from what is fetched."

_SECONDS = re.compile(r"(?:^|\bt=)(\d+)(?=;|$)")
"""The time that a server asks to wait, in a Retry-After followed by the hub's own RateLimit."""


@dataclass
class Traffic:
    """Counts what many threads receive for some files, and can end their reading.

    Attributes:
        received: bytes of weights and headers of files; those of HTTP itself are not counted.
        requests: that were answered with a range.
    """

    received: int = 0
    requests: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stop(self) -> None:
        """Let no further request begin."""
        self._stopped.set()

    def wait(self, seconds: float) -> None:
        """Sleep until `stop` is called.

        Raises:
            HubError: it was called.
        """
        if self._stopped.wait(seconds):
            raise HubError("the reading was stopped")

    def count(self, received: int) -> None:
        """Add a request and its bytes."""
        with self._lock:
            self.received += received
            self.requests += 1


class RemoteFile:
    """A file of a model at one commit, a `RangeSource`. Threads may read side by side.

    Args:
        name: of the model.
        commit: the hash of the commit.
        file: its name in the model.
        size: bytes, as the hub said.
        traffic: counts what comes.
    """

    def __init__(self, name: HubName, commit: str, file: str, size: int, traffic: Traffic) -> None:
        self.name = name
        self.commit = commit
        self.file = file
        self.size = size
        self.traffic = traffic
        self._address: str | None = None  # where the hub sent the last request, good for a while

    def reading(self, offset: int, nbytes: int) -> Fill:
        """What fills buffers with the bytes from `offset` on, `nbytes` in all, in requests of `PIECE_BYTES`.

        Raises:
            HubError: (by what is returned) they cannot be had, or are not those of this file.
        """
        rest = memoryview(b"")
        position, stop = offset, offset + nbytes

        def fill(view: memoryview) -> None:
            nonlocal rest, position
            done = 0
            while done < len(view):
                if not rest:
                    rest = memoryview(self._received(position, min(position + PIECE_BYTES, stop)))
                    position += len(rest)
                count = min(len(rest), len(view) - done)
                view[done : done + count] = rest[:count]
                rest = rest[count:]
                done += count

        return fill

    def _received(self, start: int, stop: int) -> bytes:
        """The bytes from `start` on, up to `stop` or fewer."""
        from huggingface_hub import constants, get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        own = hf_hub_url(self.name.repo, self.file, revision=self.commit)
        for wait in (*WAITS, None):
            self.traffic.wait(0)
            url, asked = self._address or own, 0
            # The token goes to the hub alone, not to where it has its large files.
            headers = build_hf_headers(token=None if url == own else False, library_name="prunecli")
            headers |= {"Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}
            options = {"timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT, "follow_redirects": True}
            try:
                with get_session().stream("GET", url, headers=headers, **options) as response:
                    data = b"" if response.status_code == 200 else response.read()  # 200: the whole file
            except Exception as error:
                if not is_unreachable(error):
                    raise describe(self.name, error) or error from error
                failure = one_line(error)
            else:
                status, said = response.status_code, response.headers
                if status == 206 and said.get("Content-Range", "").startswith(f"bytes {start}-") and data:
                    if response.url.host != urlsplit(own).hostname:
                        self._address = str(response.url)
                    self.traffic.count(len(data))
                    return bytes(data)
                failure = f"{response.url.host} answers {status}"
                if url != own and 400 <= status < 500:  # an address is good for a while
                    self._address = None
                elif status not in (408, 425, 429) and status < 500:
                    raise self._refused(response, failure)
                if found := _SECONDS.search(f"{said.get('Retry-After', '')};{said.get('RateLimit', '')}"):
                    asked = int(found[1])
            if wait is None or asked > LONGEST_WAIT:
                limit = (
                    f"and asks to wait for {asked} s"
                    if asked > LONGEST_WAIT
                    else f"{len(WAITS) + 1} times one after another"
                )
                raise self._refusal(f"{failure}, {limit}")
            self.traffic.wait(max(wait, asked))
        raise AssertionError("the last try returns or raises")

    def _refused(self, response: Any, failure: str) -> Exception:
        """The error for an answer that is no range."""
        from huggingface_hub.utils import hf_raise_for_status

        try:
            hf_raise_for_status(response)
        except Exception as error:
            return describe(self.name, error) or error
        if response.status_code == 200:
            whole = f"it would send all {bytes_text(self.size)}"
            return self._refusal(
                f"{failure}: it knows no ranges, {whole}", f"Fetch the model whole: {download(self.name)}"
            )
        return self._refusal(f"{failure} and no range of bytes")

    def _refusal(self, reason: str, remedy: str = GO_ON) -> HubError:
        return HubError(f"{self.name}: {self.file}: {reason}", remedy)
