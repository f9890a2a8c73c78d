"""What a hub says that becomes names of files: a server may say anything, and some would lead out of the cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

from prunecli.errors import HubError
from prunecli.tensors.hub.failures import host
from prunecli.tensors.hub.names import HubName

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONTENT = re.compile(r'(?:W/)?"?(?!\.*"?$)[\w.+=:-]{1,200}"?')
"""An ETag that is a name of a file; huggingface_hub takes any as one."""

_REMEDY = "Check HF_ENDPOINT, and the proxy; or choose another model."


def require_description(name: HubName, info: Any) -> Any:
    """`info`, what the hub says of a model, if its commit and files can be what they are said to be.

    Raises:
        HubError: they cannot.
    """
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise no_description(name, f"commit {info.sha!r}")
    for file in info.siblings or []:
        if not _is_inside(file.rfilename):
            raise no_description(name, f"file {file.rfilename!r}")
        if file.size is not None and (type(file.size) is not int or not 0 <= file.size < 1 << 60):
            raise no_description(name, f"{file.size!r} bytes of {file.rfilename}")
        content = file.lfs.sha256 if file.lfs else file.blob_id
        if content and not (isinstance(content, str) and _CONTENT.fullmatch(content)):
            raise no_description(name, f"content {content!r} of {file.rfilename}")
    return info


def no_description(name: HubName, said: str) -> HubError:
    """An error about what describes no model."""
    return HubError(f"{name}: {host()} describes no model ({said[:200]})", _REMEDY)


@contextmanager
def names_inside(session: Any) -> Iterator[None]:
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


def _is_inside(name: Any) -> bool:
    """Whether a file can be called so, below a directory."""
    if not isinstance(name, str) or not name or re.search(r"[\x00-\x1f\x7f]", name):
        return False
    parts = PurePosixPath(name).parts
    return not name.startswith("/") and ".." not in parts and all(len(part.encode()) < 256 for part in parts)
