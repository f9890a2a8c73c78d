"""A hub on loopback: as much of the protocol as huggingface_hub asks for, with the ways in which it goes wrong."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

MAIN_COMMIT = "1a2b3c4" + "0" * 33
LARGE = (".safetensors", ".bin", ".onnx", ".msgpack", ".gguf")
"""Files that a hub keeps apart from git, each named by its sha256."""

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Fault:
    """A fault of an answer.

    Attributes:
        status: instead of 206, without a body.
        headers: in the place of those of the same names.
        cut: bytes after which it breaks off.
        is_whole: the range is not heeded: 200 and the whole file.
        is_circle: it sends one to where one is.
        shift: where the range begins, from where it was asked for.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    is_whole: bool = False
    is_circle: bool = False
    shift: int = 0


@dataclass
class HubServer:
    """A server of files that notes the requests.

    Attributes:
        models: `org/name` -> commit -> its files.
        revisions: (`org/name`, branch or tag) -> commit.
        refused: `org/name` -> (status, error code) of every answer about it.
        refused_files: the same for the files alone.
        cuts: file -> after how many bytes each of its next answers breaks off.
        announced: file -> the size that is said of it, if not its own.
        lifetime: how many GETs an address of a large file is good for, at another host that the hub sends one to;
            None: the hub answers itself.
        description: what is said of every model instead of its files; JSON, or bytes as they are.
        headers: file -> headers of its answers, in the place of those of the same names.
        faults: of the next answers with ranges of large files, one for each: `Fault`, or None where all is well.
        tokens: what it was shown of who asks.
        longest: bytes of an answer with a range at most; None: all that were asked for.
        sent: bytes of the files themselves, of all answers with ranges of large files.
        requests: "GET /api/models/org/name/revision/main", in order; a range is put behind it.
    """

    models: dict[str, dict[str, Files]] = field(default_factory=dict)
    revisions: dict[tuple[str, str], str] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    refused_files: dict[str, tuple[int, str]] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    announced: dict[str, int] = field(default_factory=dict)
    lifetime: int | None = None
    description: Any = None
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    faults: list[Fault | None] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    longest: int | None = None
    sent: int = 0
    addresses: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def add(self, repo: str, files: Files | Path, commit: str = MAIN_COMMIT, revision: str = "main") -> None:
        """A model, from the files of a directory or as given."""
        if isinstance(files, Path):
            paths = sorted(path for path in files.rglob("*") if path.is_file())
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        self.models.setdefault(repo, {})[commit] = files
        self.revisions[repo, revision] = commit

    def fetched(self) -> list[str]:
        """The files whose content was asked for, in order."""
        got = [line.split()[1] for line in self.requests if line.startswith("GET") and "/resolve/" in line]
        return [unquote(path.split("/resolve/")[1].split("/", 1)[1]) for path in got]


@contextmanager
def serving() -> Iterator[HubServer]:
    """A server on a free port of loopback."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a client that goes away is no news
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(monkeypatch):
    """A server that huggingface_hub of this process asks, with an empty cache in `cache`."""
    from prunecli.tensors.hub.fetch import commit_of

    commit_of.cache_clear()
    with serving() as server:
        point_at(server.url, Path("cache"), monkeypatch)
        yield server


def point_at(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch, *, offline: bool = False) -> None:
    """Do what HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE would do to a new process; nothing waits between retries."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.resolve()))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("time.sleep", lambda _seconds: None)


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if self.headers.get("Authorization"):
                hub.tokens.add(self.headers["Authorization"])
            asked = f" {self.headers['Range']}" if self.headers.get("Range") else ""
            hub.requests.append(f"{self.command} {path}{asked}")
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self._information(found[1], found[2] or "main")
            elif found := re.fullmatch(r"/signed/(\d+)/([^/]+/[^/]+)/([^/]+)/(.+)", path):
                self._signed(*found.groups())
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(refs/pr/\d+|[^/]+)/(.+)", path):
                self._file(*found.groups())
            else:
                self._refuse(404, "EntryNotFound")

        do_HEAD = do_GET  # noqa: N815

        def _commit(self, repo: str, revision: str) -> str | None:
            """The commit, or None after a refusal."""
            commit = hub.revisions.get((repo, revision), revision)
            if repo in hub.refused:
                self._refuse(*hub.refused[repo])
            elif repo not in hub.models:
                self._refuse(404, "RepoNotFound")
            elif commit not in hub.models[repo]:
                self._refuse(404, "RevisionNotFound")
            else:
                return commit
            return None

        def _information(self, repo: str, revision: str) -> None:
            if commit := self._commit(repo, revision):
                files = hub.models[repo][commit]
                siblings = [
                    _sibling(name, hub.announced.get(name, len(data)), data) for name, data in files.items()
                ]
                said = hub.description or {"id": repo, "sha": commit, "siblings": siblings}
                body = said if isinstance(said, bytes) else json.dumps(said).encode()
                self._answer(200, body, {"Content-Type": "application/json"})

        def _file(self, repo: str, revision: str, name: str) -> None:
            commit = self._commit(repo, revision)
            if commit is None:
                return
            if repo in hub.refused_files:
                self._refuse(*hub.refused_files[repo])
            elif name not in hub.models[repo][commit]:
                self._refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
            elif hub.lifetime is not None and name.endswith(LARGE):
                self._elsewhere(repo, commit, name)
            else:
                self._content(name, hub.models[repo][commit][name], commit)

        def _elsewhere(self, repo: str, commit: str, name: str) -> None:
            """A redirection to another host, which knows the address for a while."""
            whole, number = hub.models[repo][commit][name], str(len(hub.addresses))
            hub.addresses[number] = hub.lifetime
            port = hub.url.rpartition(":")[2]
            headers = {
                "Location": f"http://localhost:{port}/signed/{number}/{repo}/{commit}/{name}",
                "X-Repo-Commit": commit,
                "X-Linked-Size": str(len(whole)),
                "X-Linked-Etag": f'"{_digest(whole)}"',
            }
            self._answer(302, b"", headers)

        def _signed(self, number: str, repo: str, commit: str, name: str) -> None:
            assert self.headers.get("Authorization") is None  # who holds it could act for its owner
            hub.addresses[number] -= 1
            if hub.addresses[number] < 0:
                self._answer(403, b"expired", {})
            else:
                self._content(name, hub.models[repo][commit][name], commit)

        def _content(self, name: str, whole: bytes, commit: str) -> None:
            size = hub.announced.get(name, len(whole))
            headers = {"ETag": f'"{_digest(whole)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if name.endswith(LARGE):
                headers |= {"X-Linked-Size": str(size), "X-Linked-Etag": headers["ETag"]}
            headers |= hub.headers.get(name, {})
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if wanted is None:
                self._answer(200, whole, headers, cut=self._cut(name))
                return
            fault = hub.faults.pop(0) if name.endswith(LARGE) and hub.faults else None
            fault = fault or Fault(cut=self._cut(name))
            start, end = int(wanted[1]) + fault.shift, min(int(wanted[2] or len(whole)), len(whole) - 1)
            end = end if hub.longest is None else min(end, start + hub.longest - 1)
            headers |= {"Content-Range": f"bytes {start}-{end}/{len(whole)}", **fault.headers}
            if fault.is_circle:
                self._answer(302, b"", {"Location": self.path})
            elif fault.status is not None:
                self._answer(fault.status, b"", fault.headers)
            else:
                body = whole if fault.is_whole else whole[start : end + 1]
                hub.sent += len(body[: fault.cut])
                self._answer(200 if fault.is_whole else 206, body, headers, cut=fault.cut)

        def _cut(self, name: str) -> int | None:
            return hub.cuts[name].pop(0) if self.command == "GET" and hub.cuts.get(name) else None

        def _refuse(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
            self._answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

        def _answer(
            self, status: int, body: bytes, headers: Mapping[str, str], cut: int | None = None
        ) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True

    return Handler


def _sibling(name: str, size: int, data: bytes) -> dict[str, Any]:
    known = {"rfilename": name, "size": size, "blobId": _digest(data)}
    return known | (
        {"lfs": {"sha256": _digest(data), "size": size, "pointerSize": 130}} if name.endswith(LARGE) else {}
    )


@cache
def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
