"""Files of the hub that are read by ranges, at one commit: requests, what answers must be, tries after failures."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from email.utils import parsedate_to_datetime
from time import time
from typing import Any
from urllib.parse import urlsplit

from prunecli.errors import HubError
from prunecli.tensors.hub.failures import describe, download, host, is_unreachable, one_line
from prunecli.tensors.hub.names import HubName
from prunecli.tensors.hub.traffic import Traffic
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.reader import Fill

WAITS = (0.5, 1, 2, 4, 8, 16, 32, 60)
"""Seconds before each further try of a request; what comes through in between begins anew."""

RENEWALS = 3
"""Addresses that are asked for in the place of one that is refused, at most."""

LONGEST_WAIT = 600
"""Seconds that a server may ask to wait."""

PROGRESS_BYTES = 64 << 10
"""Bytes that have to come before the tries count anew."""

GO_ON = "Start the same command again; with --stream it goes on from what is fetched."

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_RATE_LIMIT = re.compile(r"\bt=(\d+)")
_NO_LONGER = (401, 403, 404, 410)
"""What an address that was given for a while answers afterwards."""


class _PassingError(Exception):
    """A request that may do better the next time."""

    def __init__(self, reason: str, wait: float | None = None, *, stale: bool = False) -> None:
        super().__init__(reason)
        self.wait = wait
        self.stale = stale


class RemoteFile:
    """A file of a model at one commit, a `RangeSource`. Threads may read side by side.

    Args:
        name: of the model.
        commit: the hash of the commit.
        file: its name in the model.
        size: bytes, as the hub said.
        content: the name of its content there (of large files the sha256); empty: unknown.
        traffic: counts what comes.
    """

    def __init__(
        self, name: HubName, commit: str, file: str, size: int, content: str, traffic: Traffic
    ) -> None:
        self.name = name
        self.commit = commit
        self.file = file
        self.size = size
        self.content = content
        self.traffic = traffic
        self._address: str | None = None
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, offset: int, nbytes: int) -> Iterator[Fill]:
        """The bytes from `offset` on, `nbytes` in all, as they come; what breaks off is asked for from there on.

        Raises:
            HubError: (by what it yields) they cannot be had, or are not those of this file.
        """
        stream = _Stream(self, offset, offset + nbytes)
        try:
            yield stream.fill
        finally:
            stream.close()

    def read(self, offset: int, nbytes: int) -> bytes:
        """A short range.

        Raises:
            HubError: as `reading`.
        """
        data = bytearray(nbytes)
        with self.reading(offset, nbytes) as fill:
            fill(memoryview(data))
        return bytes(data)

    def address(self, stale: str | None = None) -> str:
        """Where the file lies now, of which the hub gives addresses that hold for a while; another than `stale`."""
        with self._lock:
            if self._address is None or self._address == stale:
                self._address = None
                self._address = self._asked()
            return self._address

    def refusal(self, reason: str, remedy: str | None = None) -> HubError:
        """An error about this file."""
        return HubError(f"{self.name}: {self.file}: {reason}", remedy or GO_ON)

    def check_content(self, etag: str | None) -> None:
        """Refuse another content than was there at first.

        Raises:
            HubError: it is.
        """
        found = (etag or "").removeprefix("W/").strip('"')
        if found and self.content and found != self.content:
            raise self.refusal(
                f"{host()} holds another content than when it was listed", "Start the same command again."
            )

    def _asked(self) -> str:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self.name.repo, self.file, revision=self.commit)
        try:
            found = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, library_name="prunecli")
        except Exception as error:
            raise self._failure(error) from error
        if found.commit_hash not in (None, self.commit) or found.size not in (None, self.size):
            raise self.refusal(
                f"{host()} has commit {found.commit_hash} and {found.size} bytes, not {self.commit} and {self.size}",
                "Start the same command again.",
            )
        self.check_content(found.etag)
        return str(found.location)

    def _failure(self, error: Exception) -> Exception:
        """What to do about an error of the hub's library."""
        response = getattr(error, "response", None)
        if response is not None and is_passing(response.status_code):
            return _PassingError(f"{host()} answers {response.status_code}", asked_wait(response.headers))
        if type(error).__name__ == "TooManyRedirects":
            return self.refusal(f"{host()} redirects without end")
        if is_unreachable(error) or isinstance(error, (ConnectionError, TimeoutError)):
            return _PassingError(one_line(error))
        return describe(self.name, error) or error


class _Stream:
    """A range as it comes, over as many requests as it takes."""

    def __init__(self, file: RemoteFile, position: int, stop: int) -> None:
        self._file = file
        self._position, self._stop = position, stop
        self._rest = memoryview(b"")
        self._answer: Iterator[bytes] | None = None
        self._answer_end = position
        self._opened = ExitStack()
        self._tries, self._renewals, self._since = 0, 0, 0
        self._used: str | None = None
        self._stale: str | None = None

    def fill(self, view: memoryview) -> None:
        view = view.cast("B") if view.format != "B" else view
        done = 0
        while done < len(view):
            if not self._rest:
                self._rest = self._next()
            count = min(len(self._rest), len(view) - done)
            view[done : done + count] = self._rest[:count]
            self._rest = self._rest[count:]
            done += count

    def close(self) -> None:
        if self._answer is not None and self._position == self._stop:
            with suppress(
                Exception
            ):  # what has ended is read to its end, so that the connection serves again
                next(self._answer, None)
        self._drop()

    def _next(self) -> memoryview:
        """The bytes that come next, a few of them.

        Raises:
            HubError: none do after all tries.
        """
        if self._position >= self._stop:
            raise ValueError("more bytes are wanted than were asked for")
        while True:
            self._file.traffic.wait(0)
            try:
                return self._received()
            except _PassingError as failure:
                self._drop()
                if failure.stale:
                    self._stale = self._used
                self._hold(failure)

    def _hold(self, failure: _PassingError) -> None:
        """Wait before the next try, or give up."""
        self._since = self._position
        if failure.stale and self._renewals < RENEWALS:
            self._renewals += 1
            return
        if failure.stale or self._tries >= len(WAITS):
            times = self._renewals if failure.stale else self._tries
            raise self._file.refusal(f"{failure}, {times + 1} times one after another") from failure
        wait = max(WAITS[self._tries], failure.wait or 0)
        if wait > LONGEST_WAIT:
            raise self._file.refusal(f"{failure} and asks to wait for {wait:.0f} s") from failure
        self._tries += 1
        self._file.traffic.wait(wait)

    def _received(self) -> memoryview:
        if self._answer is None:
            self._open()
        assert self._answer is not None
        try:
            piece = next(self._answer, b"")
        except Exception as error:
            raise self._file._failure(error) from error
        left = self._answer_end - self._position
        if not piece and left:
            raise _PassingError(f"the answer broke off {left} bytes before its end")
        if len(piece) > left:
            raise self._file.refusal("more bytes came than the answer said")
        if not piece:
            self._drop()
            return self._received()
        self._position += len(piece)
        self._file.traffic.count(len(piece))
        if self._position - self._since >= PROGRESS_BYTES:
            self._tries, self._renewals, self._since = 0, 0, self._position
        return memoryview(piece)

    def _drop(self) -> None:
        self._answer = None
        with suppress(Exception):
            self._opened.close()
        self._opened = ExitStack()

    def _open(self) -> None:
        """Ask for what is left, and check what the answer says it is."""
        from huggingface_hub import constants, get_session

        file = self._file
        self._used = file.address(self._stale)
        headers = {**_headers(self._used), "Range": f"bytes={self._position}-{self._stop - 1}"}
        try:
            response = self._opened.enter_context(
                get_session().stream(
                    "GET", self._used, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
                )
            )
        except Exception as error:
            raise file._failure(error) from error
        self._answer_end = self._checked(response)
        file.traffic.count(0, 1)
        self._answer = response.iter_raw()

    def _checked(self, response: Any) -> int:
        """Where the range of an answer ends."""
        file, status = self._file, response.status_code
        place = urlsplit(str(response.url)).netloc
        if is_passing(status):
            raise _PassingError(f"{place} answers {status}", asked_wait(response.headers))
        if status in _NO_LONGER:
            raise _PassingError(f"{place} no longer gives it ({status})", stale=True)
        if status == 200:
            raise file.refusal(
                f"{place} knows no ranges: it would send all {bytes_text(file.size)}",
                f"Fetch the model whole: {download(file.name)}",
            )
        said = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range") or "")
        if (
            status != 206
            or said is None
            or response.headers.get("Content-Encoding", "identity") != "identity"
        ):
            raise file.refusal(f"{place} answers a request for a range with {status} and no range of bytes")
        start, end = int(said[1]), int(said[2]) + 1
        if start != self._position or not start < end <= self._stop:
            raise file.refusal(
                f"{place} answers with bytes {start} to {end} where {self._position} to {self._stop} were asked for"
            )
        if said[3] not in ("*", str(file.size)):
            raise file.refusal(
                f"it has {said[3]} bytes on {place}, and had {file.size}", "Start the same command again."
            )
        if place == host():
            file.check_content(response.headers.get("X-Linked-Etag") or response.headers.get("ETag"))
        return end


def is_passing(status: int) -> bool:
    """Whether an HTTP status says that the same request may do better later."""
    return status in (408, 425, 429) or status >= 500


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
