"""A model of the hub as a directory of the hub's cache, its files fetched by huggingface_hub."""

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from prunecli.errors import CheckpointError, HubError, OutputError
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.tensors.directory import WEIGHT_NAMES
from prunecli.tensors.hub.names import HubName, hub_name, snapshot_in
from prunecli.tensors.hub.requests import host, one_line, plain_errors, reason
from prunecli.tensors.json_files import parsed
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.side_files import MODULES_FILE, belonging, described, module_folders

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
    from huggingface_hub import get_session, hf_hub_download

    try:
        with _names_inside(get_session()):
            return Path(hf_hub_download(repo, file, revision=revision, library_name="prunecli"))
    except HubError as error:
        raise HubError(f"{repo}: {file}: {error.message}", error.remedy) from error
    except ValueError as error:
        if type(error) is not ValueError:  # of a file that is not there
            raise
        raise HubError(f"{repo}: {file}: it cannot be fetched ({one_line(error)})") from error


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


@contextmanager
def _names_inside(session: Any) -> Iterator[None]:
    """Refuse answers within the block whose commit or name of content, by which huggingface_hub calls files, is none.

    Args:
        session: of huggingface_hub, which asks with HEAD for them.

    Raises:
        HubError: there is one.
    """

    def check(response: Any) -> None:
        if response.request.method != "HEAD":
            return
        for header, pattern in (("X-Repo-Commit", _COMMIT), ("X-Linked-ETag", _CONTENT), ("ETag", _CONTENT)):
            value = response.headers.get(header)
            if value and not pattern.fullmatch(value):
                raise HubError(f"{host()} answers with {header} {value[:200]!r}", _REMEDY)

    hooks = session.event_hooks["response"]
    hooks.append(check)
    try:
        yield
    finally:
        hooks.remove(check)
