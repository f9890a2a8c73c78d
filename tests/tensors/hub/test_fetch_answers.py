"""A hub that is none, or that means harm: what it says is no reason to write outside of the cache, nor a fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prunecli.errors import HubError
from prunecli.tensors.hub.fetch import local_directory
from tests.hub_server import HubServer, hub

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


def test_nor_are_commits(model: HubServer, tmp_path: Path) -> None:
    model.headers["config.json"] = {"X-Repo-Commit": "../../out"}
    refused(tmp_path, "answers with X-Repo-Commit '../../out'")


def test_a_page_to_log_in_describes_no_model(model: HubServer, tmp_path: Path) -> None:
    model.description = b"<html>Log in</html>"
    refused(tmp_path, "describes no model")
    assert model.fetched() == []


@pytest.mark.parametrize("name", ["../../../../out", "../../../../../out"])
def test_names_of_files_do_not_lead_out_of_the_cache(model: HubServer, tmp_path: Path, name: str) -> None:
    index = json.dumps({"weight_map": {"a": name}}).encode()
    listed = {"config.json": b"{}", "model.safetensors.index.json": index, name: b"x"}
    model.add("org/tiny", listed)
    refused(tmp_path, "")


def test_a_size_that_huggingface_hub_does_not_fetch(model: HubServer, tmp_path: Path) -> None:
    model.headers["model.safetensors"] = {"X-Linked-Size": str(10**11)}
    refused(tmp_path, "model.safetensors: it cannot be fetched .*too large")
