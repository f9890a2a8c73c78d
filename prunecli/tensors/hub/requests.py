"""Requests to the hub: files that are read by ranges, and what goes wrong in plain lines."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from prunecli.errors import CheckpointError, HubError, PruneError
from prunecli.tensors.hub.names import HubName
from prunecli.tensors.reader import Fill

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"

_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
"""Of the versions of huggingface_hub, whose errors come through where no connection is had."""


@contextmanager
def plain_errors(name: HubName) -> Iterator[None]:
    """Errors of huggingface_hub as `HubError`; those of the disk and of Python as they are.

    Raises:
        HubError: the block meets such an error, or a `CheckpointError`.
    """
    try:
        yield
    except CheckpointError as error:
        raise HubError(
            f"{name}: {error.message}", error.remedy or "Choose another model or revision."
        ) from error
    except PruneError:
        raise
    except Exception as error:
        described = describe(name, error)
        if described is None:
            raise
        raise described from error


def describe(name: HubName, error: BaseException) -> HubError | None:
    """The plain lines for an error of huggingface_hub; None for any other."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubError(
            f"{name}: no such directory here, and not (or not whole) in the cache; HF_HUB_OFFLINE forbids to fetch it",
            f"Unset HF_HUB_OFFLINE, or fetch it where there is a network: {download(name)}",
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(getattr(error, "response", None), "status_code", None)
        page = f"{constants.ENDPOINT}/{name.repo}"
        if isinstance(error, errors.GatedRepoError):
            return HubError(
                f"{name}: its authors give access on request, and you have none",
                f"Ask for it on {page}, then {LOG_IN}.",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return HubError(
                f"{name}: {host()} has {name.repo}, but no branch, tag or commit {name.revision}",
                f"Leave out @{name.revision}, or choose a revision on {page}.",
            )
        if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
            return HubError(
                f"{name}: no such directory here, and no such model on {host()}, or a private one",
                f"Check the name; for a private model {LOG_IN}.",
            )
        if status in (403, 429):
            return HubError(f"{name}: {reason(error)}", f"Check your access, try later, or {LOG_IN}.")
        return HubError(
            f"{name}: {host()} answers with an error ({one_line(error)})",
            "Try again later; what is in the cache opens with HF_HUB_OFFLINE=1.",
        )
    if is_unreachable(error) or isinstance(error, errors.FileMetadataError):
        return HubError(
            f"{name}: no such directory here, not (or not whole) in the cache, and {reason(error)} ({one_line(error)})",
            "Check the network, HF_ENDPOINT and the proxy; what is in the cache opens without a network.",
        )
    is_cut = "onsistency check failed" in str(error)  # a file came with another size than was said
    if is_cut or isinstance(error, RuntimeError) or type(error).__module__.startswith("huggingface_hub."):
        return HubError(
            f"{name}: the download from {host()} broke off ({one_line(error)})",
            "Start the same command again: complete files are kept in the cache.",
        )
    return None


def reason(error: BaseException) -> str:
    """Why the hub gave nothing, in a few words."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is None:
        return f"{host()} cannot be reached" if is_unreachable(error) else f"{host()} gives no answer of use"
    known = {
        401: "does not know you",
        403: "gives no permission",
        404: "has no such model or revision",
        429: "asks to wait: too many requests",
    }
    return f"{host()} {known.get(status, 'answers with an error')} ({status})"


def is_unreachable(error: BaseException | None) -> bool:
    """Whether it says that no connection was had, or that it broke."""
    return type(error).__module__.partition(".")[0] in _HTTP_LIBRARIES


def host() -> str:
    """`huggingface.co`, or that of HF_ENDPOINT."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT).partition("://")[2]


def download(name: HubName) -> str:
    """The command of huggingface_hub that fetches it whole."""
    return f"hf download {name.repo}" + ("" if name.revision is None else f" --revision {name.revision}")


def one_line(error: BaseException) -> str:
    """The beginning of its message, without what huggingface_hub advises."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


TRIES, LONGEST_WAIT = 8, 60
"""Number of further tries of a request, and the most seconds before one unless the server asks for more."""

PIECE_BYTES = 32 << 20
"""Most bytes of one request."""

GO_ON = "Start the same command again; with `stream` it resumes from what is fetched."


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


@dataclass(eq=False)
class RemoteFile:
    """A file of a model at one commit, a `RangeSource`. Threads may read side by side.

    Each request goes to the address that the hub sent the last one to, as long as that is good: huggingface_hub's file
    system asks the hub for every range, which limits the number of such requests in five minutes.

    Attributes:
        name: the model.
        commit: hash of the commit.
        file: name of the file in the model.
        size: bytes, as the hub said.
        traffic: counts the bytes that come.
    """

    name: HubName
    commit: str
    file: str
    size: int
    traffic: Traffic
    _address: str | None = field(default=None, init=False)

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
        if not response.content or not answered.startswith(f"206 bytes {start}-"):
            raise HubError(
                f"{self.name}: {self.file}: {host()} answers {answered}, not with the range of bytes",
                f"Fetch the model whole: {download(self.name)}",
            )
        if response.url.host != urlsplit(own).hostname:
            self._address = str(response.url)
        self.traffic.count(len(response.content))
        return bytes(response.content)
