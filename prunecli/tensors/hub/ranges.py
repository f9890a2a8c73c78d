"""Files of the hub that are read by ranges, at one commit; requests that fail are tried again."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from time import time
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

GO_ON = "Start the same command again; with --stream it goes on from what is fetched."

_NO_LONGER = (401, 403, 404, 410)
"""What an address that was given for a while answers afterwards."""


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

        own = hf_hub_url(self.name.repo, self.file, revision=self.commit)
        for wait in (*WAITS, None):
            self.traffic.wait(0)
            url = self._address or own
            headers = {**_headers(url), "Range": f"bytes={start}-{stop - 1}"}
            asked = None
            try:
                with get_session().stream(
                    "GET",
                    url,
                    headers=headers,
                    timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                    follow_redirects=True,
                ) as response:
                    data = b"" if response.status_code == 200 else response.read()  # 200: the whole file
            except Exception as error:
                if not (is_unreachable(error) or isinstance(error, (ConnectionError, TimeoutError))):
                    raise describe(self.name, error) or error from error
                failure = one_line(error)
            else:
                status, said = response.status_code, response.headers.get("Content-Range") or ""
                if status == 206 and said.startswith(f"bytes {start}-"):
                    if not 0 < len(data) <= stop - start:
                        raise self._refusal(f"{len(data)} bytes came where {stop - start} were asked for")
                    self._address = str(response.url)
                    self.traffic.count(len(data))
                    return bytes(data)
                failure = f"{urlsplit(str(response.url)).netloc} answers {status}"
                asked = asked_wait(response.headers)
                if status in _NO_LONGER and str(response.url) != own:
                    self._address = None
                elif not is_passing(status):
                    raise self._refused(response, failure)
            if wait is None:
                raise self._refusal(f"{failure}, {len(WAITS) + 1} times one after another")
            if (asked or 0) > LONGEST_WAIT:
                raise self._refusal(f"{failure} and asks to wait for {asked:.0f} s")
            self.traffic.wait(max(wait, asked or 0))
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


def is_passing(status: int) -> bool:
    """Whether an HTTP status says that the same request may do better later."""
    return status in (408, 425, 429) or status >= 500


_RATE_LIMIT = re.compile(r"\bt=(\d+)")


def asked_wait(headers: Any) -> float | None:
    """Seconds that an answer asks to wait: a Retry-After, as such or as a date, or the hub's own `RateLimit`."""
    value = (headers.get("Retry-After") or "").strip()
    if value.isdecimal():
        return float(value)
    if not value and (said := _RATE_LIMIT.search(headers.get("RateLimit") or "")):
        return float(said[1])
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    return None


def _headers(url: str) -> dict[str, str]:
    """Of a request; the token goes to the hub alone, not to where it has its large files."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    hubs = {urlsplit(str(constants.ENDPOINT)).netloc, "huggingface.co"}
    token = None if urlsplit(url).netloc in hubs else False
    return {**build_hf_headers(token=token, library_name="prunecli"), "Accept-Encoding": "identity"}
