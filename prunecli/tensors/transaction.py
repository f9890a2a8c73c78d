"""Results, directories or files, appear whole or not at all: written beside their place and renamed at the end."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from platform import node
from secrets import token_hex
from typing import Any

from prunecli.errors import HubError, OutputError, PruneError
from prunecli.processes import terminations_as_exit, undisturbed
from prunecli.tensors.json_files import lenient, parsed
from prunecli.tensors.quantities import bytes_text

NAME = ".unfinished.jsonl"
"""The store's file in a directory that is being written; a finished directory has none."""
SPARE_BYTES = 16 << 20
"""Room for the small files beside the weights."""
_NUMBERS = re.compile(r"\[\n([^\[\]{}\"]*)\]")
"""A list of numbers on several lines: it goes on one. No text holds a line end, which JSON escapes."""
_OTHER_RESULTS = (".csv", ".md", ".tex", ".png", ".html", ".hyp", ".outputs.safetensors")


def digest(value: Any) -> str:
    """sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Store:
    """Records by name. Each is on the disk before `put` returns.

    Lines that a kill cut short, that are damaged or that belong to other work count as missing.

    Attributes:
        path: the file; None: nothing is kept.
        work: names everything that the records depend on.
        records: name -> the JSON value put last.
    """

    def __init__(self, path: Path | None, work: str = "") -> None:
        self.path = path
        self.work = work
        self.records: dict[str, Any] = {}
        if path is not None and path.is_file() and not path.is_symlink():
            for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
                self._take(line)

    def put(self, name: str, value: Any) -> None:
        """Add or replace a record.

        Raises:
            OSError: the disk is full, among others.
        """
        self.records[name] = value
        if self.path is None:
            return
        record = [self.work, name, value]
        with self.path.open("a", encoding="utf-8") as file:
            # A line that an interrupt cut short has no end: each begins on a new one.
            file.write("\n" + json.dumps({"record": record, "sha256": digest(record)}))
        sync(self.path)
        sync(self.path.parent)

    def remove(self) -> None:
        """Remove the file: the work is finished."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    @lenient
    def _take(self, line: str) -> None:
        entry = parsed(line)
        work, name, value = entry["record"]
        if work == self.work and entry["sha256"] == digest(entry["record"]):
            self.records[name] = value


class Journal(Store):
    """How far the files of a directory are written.

    A record is [bytes, steps done, digest of the steps] under the name of the file; 0 steps: it is complete. Without
    `work` nothing is noted: the files are written anew each time.
    """

    def __init__(self, directory: Path, work: str | None) -> None:
        super().__init__(None if work is None else directory / NAME, work or "")
        self.directory = directory
        for file, (nbytes, steps, _) in list(self.records.items()):
            path = directory / file
            is_file = Path(file).name == file and not path.is_symlink() and path.is_file()
            size = path.stat().st_size if is_file else -1
            if size < nbytes or (not steps and size != nbytes):
                del self.records[file]

    @property
    def nbytes(self) -> int:
        """Bytes that need not be written again."""
        return sum(nbytes for nbytes, _, _ in self.records.values())

    def has(self, file: str) -> bool:
        """Whether a file is complete."""
        return file in self.records and not self.records[file][1]

    def steps(self, file: str, layout: str) -> int:
        """How many of the steps that write a file, whose digest is `layout`, are done; 0 if it is another digest."""
        _, steps, noted = self.records.get(file, (0, 0, layout))
        return int(steps) if noted == layout else 0

    def note(self, file: str, nbytes: int, steps: int = 0, layout: str = "") -> None:
        """Wait until a file is on the disk and note how far it is: a power failure leaves no note of what is not there.

        Raises:
            OSError: the disk is full, among others.
        """
        if self.path is not None:
            sync(self.directory / file)
            self.put(file, [nbytes, steps, layout])

    def tidy(self) -> None:
        """Remove everything else from the directory."""
        for path in self.directory.iterdir():
            if path.name != NAME and path.name not in self.records:
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk.

    Raises:
        OSError: the disk could not take it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; what the disk could not take must be heard of.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def acquire(path: Path) -> int | None:
    """Lock the file `path`, which is made if need be; closing the returned descriptor, or the process's end, frees it.

    Process ids cannot say whether a writer is alive: they are used again, and two containers both have a process 1.
    A process may remove the file while it holds the lock: whoever opened it before locks the next file of that name.

    Returns:
        None: the file system has no locks, as some network file systems.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be made.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        held = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            pass
        except BlockingIOError:
            raise
        except OSError:  # no locks here
            path.unlink(missing_ok=True)
            return None
        finally:
            if not held:
                os.close(descriptor)
        if held:
            return descriptor


@contextmanager
def new_directory(
    target: Path,
    *,
    force: bool,
    needed_bytes: int,
    source: Path | None = None,
    resume: str | None = None,
) -> Iterator[Path]:
    """A hidden directory beside `target` to write into; it becomes `target` when the block ends well.

    Whatever ends the block early (an error, Ctrl-C, SIGTERM, SIGHUP) removes it and leaves `target` as it was. What
    a SIGKILL left behind goes when the same target is written the next time. As with `cp`, the disk may take the
    files a little later; only an old `target` is kept until it has.

    Args:
        force: replace an existing `target`, at the very end.
        needed_bytes: what will be written; the file system must have that much free.
        source: a directory that `target` must neither be, hold nor lie in.
        resume: the key of work that goes on from what is left of it. Then a hub that gives nothing more, SIGTERM and
            SIGHUP leave what the directory's `Journal` names, and work of the same key begins with those
            and with what a SIGKILL left. Ctrl-C and all else remove it as ever, and so does work of another key.

    Raises:
        OutputError: `target` exists, cannot be written, overlaps `source`, or the disk lacks room.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 (a link stays a link)
    refuse_target(target, force=force, source=source)

    def done(path: Path) -> int:
        return 0 if path.is_symlink() or not path.is_dir() else Journal(path, resume).nbytes

    with terminations_as_exit():
        try:
            with _hidden(target, done) as partial:
                is_kept = False
                try:
                    require_space(target, needed_bytes - done(partial))
                    partial.mkdir(exist_ok=True)
                    yield partial
                    _publish(partial, target, force=force)
                except (HubError, SystemExit):
                    is_kept = done(partial) > 0
                    raise
                finally:
                    with undisturbed():
                        if is_kept:
                            Journal(partial, resume).tidy()
                        else:
                            shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            raise output_error(target, error) from error


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A hidden name beside `path` to write to; it becomes `path` when the block ends well.

    Whatever ends the block early removes it and leaves `path` as it was. What a SIGKILL left behind goes when the same
    file is written the next time.

    Raises:
        OutputError: its directory does not exist, `path` is there and no file, or the file cannot be written.
    """
    refuse_output(path, "file", force=True)
    try:
        with _hidden(path) as partial:
            try:
                yield partial
                partial.replace(path)
            finally:
                with suppress(OSError):  # such as a name that is too long: then it was not made either
                    partial.unlink(missing_ok=True)
    except OSError as error:
        raise output_error(path, error) from error


def refuse_output(path: Path, kind: str, *, force: bool) -> None:
    """Refuse a place where no result can be written.

    Args:
        kind: "file" or "directory", which the result is.
        force: whether a file is replaced; of directories, only checkpoints and empty ones.

    Raises:
        OutputError: something is there that is not replaced, or its directory is missing or cannot be written to.
    """
    other = "Choose another path."
    parent = path.absolute().parent
    if kind == "file" and path.is_dir():
        raise OutputError(f"{path}: a directory, where a file is to be written", other)
    if os.path.lexists(path):
        if not force:
            raise OutputError(f"{path}: exists already", "Choose another path, or replace it with `force`.")
        if kind == "file" and not path.is_file():  # root may rename over a device such as /dev/null
            raise OutputError(f"{path}: not a file, which alone is replaced", other)
        is_old = path.is_dir() and not path.is_symlink()
        if kind == "directory" and not (
            is_old and ((path / "config.json").is_file() or not any(path.iterdir()))
        ):
            raise OutputError(f"{path}: is not a checkpoint directory; `force` replaces only those", other)
    if not parent.is_dir():
        raise OutputError(f"{path.parent}: no such directory", "Make it first, or choose another path.")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{path}: nothing can be written in {parent}", other)


def refuse_target(target: Path, *, force: bool, source: Path | None = None) -> None:
    """`refuse_output` for a checkpoint directory, which must not overlap the one that it is made of.

    Raises:
        OutputError: as `refuse_output`; or it overlaps `source`.
    """
    if source is not None:
        real, origin = target.resolve(), source.resolve()
        if real.is_relative_to(origin) or origin.is_relative_to(real):
            raise OutputError(f"{target}: overlaps the checkpoint {source}", "Choose another path.")
    refuse_output(target, "directory", force=force)


def require_space(target: Path, needed_bytes: int) -> None:
    """Check that the file system of `target` has `needed_bytes` free, and some more for small files.

    Raises:
        OutputError: the disk lacks space, with both numbers.
    """
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes + SPARE_BYTES:
        needed = bytes_text(needed_bytes + SPARE_BYTES)
        raise OutputError(
            f"{target.parent}: {needed} are needed, {bytes_text(free)} are free",
            "Free some space, or choose another path.",
        )


def output_error(target: Path, error: OSError) -> OutputError:
    """Describe an error of the system in writing `target`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(
            f"{target}: the disk is full; nothing was written", "Free some space, or choose another path."
        )
    of = f" ({error.filename})" if error.filename else ""
    return OutputError(f"{target}: not written: {error.strerror or error}{of}", "Choose another path.")


def _publish(partial: Path, target: Path, *, force: bool) -> None:
    if not os.path.lexists(target):
        partial.rename(target)
        return
    refuse_target(target, force=force)  # it appeared meanwhile
    # A power failure must not take the old result and the new one.
    for folder, _, files in os.walk(partial, topdown=False):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))
    old = partial.with_suffix(".old")
    with undisturbed():
        target.rename(old)
        try:
            partial.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)


@cache
def _machine() -> tuple[str, str]:
    """Short digests of the running kernel, which containers share, and of the host's name, which outlives a boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    names = (boot.read_text() if boot.is_file() else node(), node())
    return digest(names[0])[:6], digest(names[1])[:6]


@contextmanager
def _hidden(target: Path, done: Callable[[Path], int] = lambda _: 0) -> Iterator[Path]:
    """A hidden name beside `target`, whose lock this process holds within the block.

    A writer called TOKEN writes `.NAME.TOKEN.partial`, replaces `.NAME.TOKEN.old` and holds the lock
    `.NAME.TOKEN.lock`. Where the lock can be had, the writer has ended: its files go, and an old result that was on its
    way out comes back. Where the file system has no locks, nothing is taken for abandoned.

    Args:
        done: bytes of a partial result from which this process goes on; it takes over the one with most.
    """
    pattern = re.compile(re.escape(f".{target.name}.") + r"(\d+(?:-\w+)?)\.(?:partial|old|lock)")
    tokens = {match[1] for path in target.parent.iterdir() if (match := pattern.fullmatch(path.name))}
    with ExitStack() as locks:

        def place(token: str, ending: str) -> Path:
            return target.with_name(f".{target.name}.{token}.{ending}")

        def locked(token: str) -> bool:
            path = place(token, "lock")
            try:
                held = acquire(path)
            except BlockingIOError:
                return False
            if held is None:
                return False
            locks.callback(os.close, held)
            locks.callback(path.unlink, missing_ok=True)
            return True

        def is_own(token: str) -> bool:
            """A network file system may keep locks to the machine: what another one writes is left alone."""
            return "-" not in token or any(digest in token for digest in _machine())

        ended = sorted(
            (token for token in tokens if is_own(token) and locked(token)),
            key=lambda token: done(place(token, "partial")),
        )
        taken = ended[-1] if ended and done(place(ended[-1], "partial")) else None
        for token in ended:
            old = place(token, "old")
            if os.path.lexists(old) and not os.path.lexists(target):
                old.rename(target)
            for path in (old, *([] if token == taken else [place(token, "partial")])):
                _remove(path)
        if taken is None:
            taken = f"{os.getpid()}-{''.join(_machine())}{token_hex(2)}"
            locked(taken)
        yield place(taken, "partial")


def write_json(
    path: Path | str, payload: Mapping[str, Any], *, force: bool = False, allow_nan: bool = False
) -> None:
    """Write `payload` beside `path`, then rename: the file appears whole or not at all.

    Args:
        path: the file.
        payload: what it is to hold.
        force: whether an existing file is replaced.
        allow_nan: whether NaN and infinity are written as Python writes them.

    Raises:
        OutputError: it exists and `force` is not given, or its directory does not.
        PruneError: a number is NaN or infinite and may not be, or a value has no form in JSON.
    """
    path = Path(path)
    refuse_output(path, "file", force=force)
    try:
        text = json.dumps(payload, indent=1, ensure_ascii=False, allow_nan=allow_nan, default=dict)
    except (TypeError, ValueError) as error:
        raise PruneError(f"{path}: not written: {error}") from error
    text = _NUMBERS.sub(lambda numbers: f"[{' '.join(numbers[1].split())}]", text) + "\n"
    with new_file(path) as partial:
        # Names of files may hold halves of surrogate pairs; Python escapes them as JSON does.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def refuse_unwritable(path: Path, *, force: bool) -> None:
    """For a command's beginning, so that long work does not end at an output that cannot be written.

    Raises:
        OutputError: `path` is a directory, exists and `force` is not given, is no file (a device, say) or no result
            of prunecli's, or lies in no directory, or in one that cannot be written to.
    """
    refuse_output(path, "file", force=force)
    # Of JSON that prunecli writes "format" comes first; tables, pictures and pages have endings of their own.
    if not path.is_file() or path.name.lower().endswith(_OTHER_RESULTS):
        return
    with path.open("rb") as file:
        start = file.read(200).strip()
    if start and not (start.startswith(b"{") and b'"format": "prunecli.' in start):
        raise OutputError(
            f"{path}: no result of prunecli's; `force` replaces only those",
            "Choose another path, or remove it.",
        )


def partial_path(output: Path) -> Path:
    """Return the file that keeps the state of an unfinished run for the file `output`."""
    return output.with_name(f".{output.name}.partial")
