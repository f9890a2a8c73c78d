"""Which names of checkpoints are the hub's and which are paths. No network, and no import that costs time."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from prunecli.errors import CheckpointError

MAIN = "main"
"""The revision where none is given."""

CONVERTED = ".prunecli-"
"""Beginning of the name of a temporary directory that holds a converted checkpoint."""

LONGEST_ID = 96
"""Characters of `org/name`."""

_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@({_PART}(?:/{_PART})*))?", re.ASCII)
_REPOSITORY = "models--"
_SNAPSHOTS = "snapshots"
_PATH = r"(?<![^\s'\"(])[^\s'\"(]*"  # from the beginning of a word alone: long words are searched once
_SNAPSHOT_PATH = re.compile(rf"{_PATH}{_REPOSITORY}([^/\s]+)/{_SNAPSHOTS}/([0-9a-f]{{7}})[0-9a-f]{{33}}")
_CONVERTED_PATH = re.compile(rf"{_PATH}{re.escape(CONVERTED)}\w+/")


@dataclass(frozen=True)
class HubName:
    """A model of the hub.

    Attributes:
        repo: `org/name`.
        revision: branch, tag or commit; None: the main branch.
    """

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def hub_name(name: Path | str) -> HubName | None:
    """The model that `org/name` or `org/name@revision` means, or None where `name` is a path.

    It is a path where something of this name exists, where a directory `org` does and no revision is given (a
    directory that is missing in `models/` is a slip, no model of an organisation called "models"), and where it is
    written as one: `./a/b`, `/a/b`, `a/b/`, `a/b/c`.
    """
    hub = _shaped(str(name))
    if hub is None or os.path.lexists(name):
        return None
    return None if hub.revision is None and Path(hub.repo).parent.is_dir() else hub


def local_path(name: Path | None) -> Path | None:
    """`name` where it is a path, None where it is a model of the hub or nothing."""
    return None if name is None or hub_name(name) else name


def checkpoint_path(name: str) -> Path:
    """`name` as a `Path`, which would drop what tells the path `./a/b` or `a/b/` from the model `a/b`."""
    path = Path(name)
    return path if _shaped(name) or _shaped(str(path)) is None else path.absolute()


def expanded(value: str) -> str:
    """Return a value of the command line or of a recipe with the user's home directory in place of `~`.

    No shell does this within quotes or after `=`: `'~/a'`, `--text=~/a`, `NAME=~/a`.
    """
    match = re.fullmatch(r"((?:[^=/~]*=){0,2})(~[^/]*/.*)", value, re.DOTALL)
    return value if match is None else match[1] + os.path.expanduser(match[2])  # noqa: PTH111 (keeps a last slash)


def no_such_directory(path: Path) -> CheckpointError:
    """Describe a path that does not exist."""
    hub = _shaped(str(path))
    if hub is None:
        remedy = "Give a checkpoint directory, or a model of the hub as org/name."
    else:
        folder = Path(hub.repo).parent
        remedy = (
            f"{folder} is a directory here, so it is taken as a path; the hub's model is {hub.repo}@{MAIN}."
        )
    return CheckpointError(f"{path}: no such directory", remedy)


def snapshot_in(path: Path) -> Path:
    """The checkpoint in a folder of the hub's cache, `models--org--name`; another directory stays as it is.

    Raises:
        CheckpointError: it holds several snapshots and none of the main branch, or none at all.
    """
    snapshots = path / "snapshots"
    if not path.name.startswith("models--") or not snapshots.is_dir() or (path / "config.json").exists():
        return path
    main = path / "refs" / MAIN
    if main.is_file() and (current := snapshots / main.read_text(encoding="utf-8").strip()).is_dir():
        return current
    found = sorted(snapshots.iterdir())
    if len(found) == 1:
        return found[0]
    raise CheckpointError(
        f"{path}: holds {len(found)} snapshots, and {MAIN} is none of them",
        f"Give one: {', '.join(map(str, found[:3]))}." if found else "Give the model by its name: org/name.",
    )


def origin(path: Path) -> dict[str, str]:
    """`{"path": NAME}`, a link's own; of a snapshot in the hub's cache also its `revision`, and the `subfolder` in it.

    There the directory is named by a hash, and the repository two levels above it:
    `models--ORG--NAME/snapshots/HASH` gives `{"path": "ORG/NAME", "revision": HASH}`.
    """
    real = path.resolve()
    for snapshot in (real, *real.parents):
        repository = snapshot.parent.parent.name
        if snapshot.parent.name == _SNAPSHOTS and repository.startswith(_REPOSITORY):
            known = {
                "path": repository.removeprefix(_REPOSITORY).replace("--", "/"),
                "revision": snapshot.name,
            }
            inside = real.relative_to(snapshot).as_posix()
            return known if inside == "." else {**known, "subfolder": inside}
    return {"path": real.name if path.name in ("", "..") else path.name}


def with_origins(text: str) -> str:
    """`text` with names as they were typed: `ORG/NAME@REVISION` for snapshots, `a.gguf` for what was converted."""
    text = _CONVERTED_PATH.sub("", text)
    return _SNAPSHOT_PATH.sub(lambda match: f"{match[1].replace('--', '/')}@{match[2]}", text)


def _shaped(name: str) -> HubName | None:
    """`name` as a model, whatever exists here."""
    match = _NAME.fullmatch(name)
    if match is None or len(match[1]) > LONGEST_ID or match[1].endswith(".git"):
        return None
    return None if "--" in match[1] or ".." in name else HubName(match[1], match[2])
