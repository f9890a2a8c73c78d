"""A model of the hub as a directory of the hub's cache, or as files that are read by ranges; errors in plain lines."""

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from prunecli.errors import CheckpointError, HubError, OutputError, PruneError
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.tensors.directory import WEIGHT_NAMES
from prunecli.tensors.hub.names import HubName, hub_name, snapshot_in
from prunecli.tensors.json_files import parsed
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.reader import Fill
from prunecli.tensors.side_files import MODULES_FILE, belonging, described, module_folders

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
        plain = describe(name, error)
        if plain is None:
            raise
        raise plain from error


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
        received: bytes of each answer, without HTTP's own.
    """

    name: HubName
    commit: str
    file: str
    size: int
    received: list[int] = field(default_factory=list, init=False)
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
        self.received.append(len(response.content))
        return bytes(response.content)


CONFIG = "config.json"

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONTENT = re.compile(r'(?:W/)?"?(?!\.*"?$)[\w.+=:-]{1,200}"?')
"""An ETag that is a name of a file; huggingface_hub takes any as one."""

_REMEDY = "Check HF_ENDPOINT, and the proxy; or choose another model."


class _Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class _Content(_Answer):
    sha256: str


class _File(_Answer):
    rfilename: str
    size: NonNegativeInt | None
    blob_id: str | None
    lfs: _Content | None


class _Description(_Answer):
    """The fields of huggingface_hub's `ModelInfo` that are read, which it does not check."""

    sha: str
    siblings: list[_File]


@dataclass(frozen=True)
class Snapshot:
    """A model at one commit, in the cache: some of its files may not be there yet.

    Attributes:
        name: as it was asked for.
        directory: in the cache, named by the commit; it holds config.json.
        sizes: file -> bytes, of every file that the hub has; None where the hub could not be asked.
        blobs: file -> the name of its content in the cache.
    """

    name: HubName
    directory: Path
    sizes: Mapping[str, int] | None
    blobs: Mapping[str, str]

    @property
    def commit(self) -> str:
        """The hash of the commit."""
        return self.directory.name

    def __str__(self) -> str:
        return f"{self.name.repo} at {self.commit[:7]}"

    def read(self, file: str) -> Any:
        """The JSON of a small file, fetched where it is not there.

        Raises:
            CheckpointError: it is not JSON.
            Exception: of huggingface_hub, where it cannot be fetched.
        """
        path = self.directory / file
        if not path.is_file():
            with _bars(False):
                path = _fetch(self.name.repo, file, self.commit)
        try:
            return parsed(path.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"its {file} is not JSON ({error})") from error

    def is_whole(self) -> bool:
        """Whether its weights are all there, as far as that can be known without the hub."""
        held = [
            path.relative_to(self.directory).as_posix()
            for path in self.directory.rglob("*")
            if path.is_file()
        ]
        with suppress(CheckpointError):
            return bool(weight_files(held, self.read))
        return False


def local_directory(
    name: Path | str, *, say: Say = unsaid, progress: Progress = silent, bars: bool = True
) -> Path:
    """Return the directory of a checkpoint: `name` itself, or the snapshot of `org/name[@revision]` in the hub's cache.

    Missing files are fetched first. With HF_HUB_OFFLINE, or if the hub cannot be reached, the files in the cache
    must do. No path causes a request: see `hub_name`.

    Args:
        say: told which files are fetched and their size, before they are.
        progress: advances by the bytes of each file, once it is there.
        bars: whether huggingface_hub shows its own, in a terminal.

    Raises:
        HubError: there is no such model or revision, no access, no network, or prunecli cannot read the model.
        OutputError: the disk lacks space.
        CheckpointError: `name` is a folder of the cache with several snapshots.
    """
    hub = hub_name(name)
    if hub is None:
        return snapshot_in(Path(name))
    with plain_errors(hub):
        snapshot = look_up(hub, say)
        if snapshot.sizes is not None:
            fetch(snapshot, needed_files(snapshot.sizes, snapshot.read), say, progress, bars)
        return snapshot.directory


@cache
def commit_of(name: HubName) -> str:
    """Return the commit of a model, or, without a network, that of the cache; asked once in a process.

    Raises:
        HubError: as `local_directory`.
    """
    with plain_errors(name):
        answer, cached = _ask(name), _cached_config(name)
        if not isinstance(answer, Exception):
            return str(answer.sha)
        if cached is None:
            raise answer
        return cached.parent.name


def look_up(name: HubName, say: Say) -> Snapshot:
    """List the files of a model, and fetch config.json alone.

    Raises:
        CheckpointError: the model has no config.json.
        Exception: an error of huggingface_hub, if the hub cannot be asked and the cache does not hold all weights; to
            be called within `plain_errors`.
    """
    from huggingface_hub import constants

    answer, cached = _ask(name), _cached_config(name)
    if isinstance(answer, Exception):
        snapshot = None if cached is None else Snapshot(name, cached.parent, None, {})
        if snapshot is None or not snapshot.is_whole():
            raise answer
        if not constants.HF_HUB_OFFLINE:
            say(f"{reason(answer)}: using {snapshot} from the cache.")
        return snapshot
    files = answer.siblings
    sizes = {file.rfilename: file.size or 0 for file in files}
    if CONFIG not in sizes:
        what = f"it holds no {CONFIG}, so it is no checkpoint of transformers"
        raise CheckpointError(*(described(_telling(sizes), name.repo, lambda _: None) or (what,)))
    if cached is None or cached.parent.name != answer.sha:
        with _bars(False):  # by the revision, so that the cache knows later which commit the revision is
            cached = _fetch(name.repo, CONFIG, name.revision)
        if cached.parent.name != answer.sha:  # the revision moved on between two requests
            return look_up(HubName(name.repo, cached.parent.name), say)
    blobs = {file.rfilename: str(file.lfs.sha256 if file.lfs else file.blob_id) for file in files}
    return Snapshot(name, cached.parent, sizes, blobs)


def needed_files(sizes: Mapping[str, int], read: Callable[[str], Any]) -> tuple[str, ...]:
    """The files to fetch, those beside the weights first: what would travel along from a directory of the same files.

    Args:
        sizes: path -> bytes, of every file of the model.
        read: gives the JSON of one of them.

    Raises:
        CheckpointError: there are no weights that prunecli reads, or the index names others than there are.
    """
    modules = module_folders(read(MODULES_FILE)) if MODULES_FILE in sizes else ()
    weights = weight_files(sizes, read)
    beside, _ = belonging({name: size for name, size in sizes.items() if name not in weights}, modules)
    return (*beside, *weights)


def weight_files(files: Collection[str], read: Callable[[str], Any]) -> tuple[str, ...]:
    """The weights, their index first; .safetensors where there are any.

    Raises:
        CheckpointError: as `needed_files`.
    """
    for name in WEIGHT_NAMES:
        index = f"{name}.index.json"
        if name in files:
            return (name,)
        if index in files:
            content = read(index)
            weight_map = content.get("weight_map") if isinstance(content, dict) else None
            # What is wrong with an index is said when the directory is opened.
            named = weight_map.values() if isinstance(weight_map, dict) else ()
            shards = sorted({shard for shard in named if isinstance(shard, str)})
            if missing := [shard for shard in shards if shard not in files]:
                raise CheckpointError(f"its {index} names {missing[0]}, which it does not hold")
            return (index, *shards)
    what = f"it holds no weights that prunecli reads ({' or '.join(WEIGHT_NAMES)})"
    raise CheckpointError(*(described(_telling(files), "DIR", read) or (what,)))


def _telling(files: Collection[str]) -> list[str]:
    """Files that may say what the model is; checkpoints in its folders have no name on the hub."""
    return [name for name in files if not name.endswith("/config.json")]


def _ask(name: HubName) -> _Description | Exception:
    """Return the hub's description of a model, or the error instead."""
    from huggingface_hub import HfApi, constants

    try:
        return _Description.model_validate(
            HfApi(library_name="prunecli").model_info(
                name.repo, revision=name.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
        )
    except (LookupError, TypeError, ValueError) as error:  # a page to log in to a network, for one
        return HubError(f"{name}: {host()} describes no model ({one_line(error)})", _REMEDY)
    except Exception as error:
        return error


def _cached_config(name: HubName) -> Path | None:
    """config.json in the cache, of the revision as it was last known."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name.repo, CONFIG, revision=name.revision)
    return Path(path) if isinstance(path, str) else None


def fetch(
    snapshot: Snapshot,
    files: Sequence[str],
    say: Say = unsaid,
    progress: Progress = silent,
    bars: bool = True,
) -> None:
    """Fetch those of the files that the snapshot lacks.

    Raises:
        HubError, OutputError, Exception: as `local_directory`; to be called within `plain_errors`.
    """
    sizes = snapshot.sizes or {}
    missing = [file for file in files if not (snapshot.directory / file).is_file()]
    blobs = snapshot.directory.parents[1] / "blobs"  # another snapshot may have the same content
    fetched = {file: sizes[file] for file in missing if not (blobs / snapshot.blobs.get(file, "")).is_file()}
    total = sum(fetched.values())
    if fetched:
        count = f"{len(fetched)} files" if len(fetched) > 1 else next(iter(fetched))
        cache = snapshot.directory.parents[2]
        say(f"Fetching {snapshot} from {host()}: {count}, {bytes_text(total)}, into {cache}")
        free = shutil.disk_usage(cache).free
        if free < total:
            raise OutputError(
                f"{snapshot.name}: {bytes_text(total)} are to be fetched into {cache}, "
                f"{bytes_text(free)} are free there",
                "Free some space, or set HF_HUB_CACHE to a directory on another disk.",
            )
    try:
        with _bars(bars), progress(f"{snapshot.name.repo}: fetching", total, "bytes") as advance:
            for file in missing:
                _fetch(snapshot.name.repo, file, snapshot.commit)
                advance(fetched.get(file, 0))
    except KeyboardInterrupt:
        say("Complete files are kept in the cache: the same command resumes from there.")
        raise


def _fetch(repo: str, file: str, revision: str | None) -> Path:
    """Fetch a file into the cache.

    Raises:
        HubError: the file cannot be fetched; or an answer has a commit or a name of content, by which huggingface_hub
            calls files, that is none.
    """
    from huggingface_hub import get_session, hf_hub_download

    def check(response: Any) -> None:
        if response.request.method != "HEAD":  # which asks for them
            return
        for header, pattern in (("X-Repo-Commit", _COMMIT), ("X-Linked-ETag", _CONTENT), ("ETag", _CONTENT)):
            value = response.headers.get(header)
            if value and not pattern.fullmatch(value):
                raise HubError(f"{repo}: {file}: {host()} answers with {header} {value[:200]!r}", _REMEDY)

    hooks = get_session().event_hooks["response"]
    hooks.append(check)
    try:
        return Path(hf_hub_download(repo, file, revision=revision, library_name="prunecli"))
    except ValueError as error:
        if type(error) is not ValueError:  # of a file that is not there
            raise
        raise HubError(f"{repo}: {file}: it cannot be fetched ({one_line(error)})") from error
    finally:
        hooks.remove(check)


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Show the progress bars of huggingface_hub within the block, or not."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
