"""By which name a checkpoint is known: that of its directory, or its id on the hub."""

from __future__ import annotations

import re
from pathlib import Path

_REPOSITORY = "models--"
_SNAPSHOTS = "snapshots"
_SNAPSHOT_PATH = re.compile(
    # from the beginning of a word alone, or a long one would be searched from each of its letters
    rf"(?<![^\s'\"(])[^\s'\"(]*{_REPOSITORY}([^/\s]+)/{_SNAPSHOTS}/([0-9a-f]{{7}})[0-9a-f]{{33}}"
)


def origin(path: Path) -> dict[str, str]:
    """`{"path": NAME}`; of a snapshot in the hub's cache also its `revision`, and the `subfolder` in it.

    There the directory is named by a hash, and the repository two levels above it:
    `models--ORG--NAME/snapshots/HASH` gives `{"path": "ORG/NAME", "revision": HASH}`.
    """
    path = path.resolve()
    for snapshot in (path, *path.parents):
        repository = snapshot.parent.parent.name
        if snapshot.parent.name == _SNAPSHOTS and repository.startswith(_REPOSITORY):
            found = {
                "path": repository.removeprefix(_REPOSITORY).replace("--", "/"),
                "revision": snapshot.name,
            }
            inside = path.relative_to(snapshot).as_posix()
            return found if inside == "." else {**found, "subfolder": inside}
    return {"path": path.name}


def with_origins(text: str) -> str:
    """`text`, in which paths of snapshots are `ORG/NAME@REVISION`: what was typed, not where the cache has it."""
    return _SNAPSHOT_PATH.sub(lambda found: f"{found[1].replace('--', '/')}@{found[2]}", text)
