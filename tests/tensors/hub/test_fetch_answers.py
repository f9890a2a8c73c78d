"""A hub that is none, or that means harm: what it says is no reason to write outside of the cache, nor a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prunecli.errors import HubError
from prunecli.tensors.hub.fetch import local_directory
from tests.hub_server import MAIN_COMMIT, HubServer, hub

__all__ = ["hub"]

FILES = {"config.json": b"{}", "model.safetensors": b"x"}


@pytest.fixture
def model(hub: HubServer) -> HubServer:
    hub.add("org/tiny", FILES)
    return hub


def refused(tmp_path: Path, message: str) -> None:
    """With a line, and without a file anywhere but in the cache."""
    with pytest.raises(HubError, match=rf"^org/tiny(@\w+)?: .*{message}") as caught:
        local_directory("org/tiny")
    assert "\n" not in caught.value.message
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}
    assert {path.name for path in (tmp_path / "cache").glob("*")} <= {
        "models--org--tiny",
        ".locks",
        "CACHEDIR.TAG",
    }


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag"])
@pytest.mark.parametrize("value", ['"../../../out"', '"/tmp/out"', 'W/"a/b"', '".."', "a" * 300])
def test_names_of_contents_are_no_paths(model: HubServer, tmp_path: Path, header: str, value: str) -> None:
    model.headers["config.json"] = {header: value}
    refused(tmp_path, f"config.json: 127.0.0.1.* answers with (?i:{header})")


def test_a_commit_is_the_one_that_was_asked_for(model: HubServer, tmp_path: Path) -> None:
    """It asked for another one, and again, a thousand times."""
    model.headers["config.json"] = {"X-Repo-Commit": "c" * 40}
    model.revisions["org/tiny", "c" * 40] = MAIN_COMMIT
    with pytest.raises(HubError, match=f"^org/tiny@c+: .* answers with commit {MAIN_COMMIT}"):
        local_directory("org/tiny")


def siblings(**file: Any) -> dict[str, Any]:
    return {"id": "org/tiny", "sha": MAIN_COMMIT, "siblings": [{"rfilename": "config.json"}, file]}


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (b"<html>Log in</html>", "describes no model"),
        (b"[" * 100_000, "describes no model"),
        ([1], "describes no model"),
        (siblings(rfilename="model.safetensors") | {"sha": "../../out"}, r"answers with commit \.\./"),
        ({"id": "org/tiny", "sha": MAIN_COMMIT, "siblings": "abc"}, "describes no model"),
        (siblings(size=1), "describes no model .'rfilename'"),
        (siblings(rfilename=5), "describes no model"),
        *((siblings(rfilename=name), "file ") for name in ("a/../../b", "/a")),
    ],
)
def test_what_describes_no_model(model: HubServer, tmp_path: Path, description: Any, message: str) -> None:
    model.description = description
    refused(tmp_path, message)
    assert set(model.fetched()) <= {"config.json"}


def test_a_size_that_huggingface_hub_does_not_fetch(model: HubServer, tmp_path: Path) -> None:
    model.headers["model.safetensors"] = {"X-Linked-Size": str(10**11)}
    refused(tmp_path, "model.safetensors: it cannot be fetched .*too large")
