"""Which names are the hub's and which are paths; the name by which a checkpoint is known, wherever it lies."""

from pathlib import Path

import pytest

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import open_model
from prunecli.model.history import named
from prunecli.tensors.hub.names import (
    HubName,
    checkpoint_path,
    hub_name,
    origin,
    snapshot_in,
)
from tests.tiny import tiny_nllb_moe, write_files


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("facebook/nllb-moe-54b", "facebook/nllb-moe-54b", None),
        ("Helsinki-NLP/opus-mt-en-de", "Helsinki-NLP/opus-mt-en-de", None),
        ("meta-llama/Llama-3.2-1B@main", "meta-llama/Llama-3.2-1B", "main"),
        ("a/b@refs/pr/3", "a/b", "refs/pr/3"),
        ("a/b@v1.0", "a/b", "v1.0"),
        ("a/b_c@" + "0" * 40, "a/b_c", "0" * 40),
    ],
)
def test_a_model_and_its_revision(text, repo, revision):
    name = HubName(repo, revision)
    assert hub_name(text) == hub_name(Path(text)) == hub_name(checkpoint_path(text)) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "gpt2", "a/b/c", "/a/b", "../a", "./a/b", "~/a", "a/b@", "@main", "a/b@../c", "a /b", "a/é"),
        *("a/b--c", "a/.b", "-a/b", "a/b.git", "a\\b", "x" * 60 + "/" + "y" * 60),
    ],
)
def test_everything_else_is_a_path(text):
    assert hub_name(text) is None
    assert hub_name(checkpoint_path(text)) is None


def test_what_exists_here_is_a_path():
    Path("org/name").mkdir(parents=True)
    assert hub_name("org/name") is None
    assert hub_name("org/other") is None  # a slip in the path
    assert hub_name("org/other@main") == HubName("org/other", "main")
    Path("org/name@v1").mkdir()
    assert hub_name("org/name@v1") is None
    Path("org/broken@v1").symlink_to("nowhere")
    assert hub_name("org/broken@v1") is None


CACHE = Path("models--org--name")


@pytest.mark.parametrize("commits", [[], ["a" * 40, "b" * 40]])
def test_a_folder_of_the_cache_is_its_main_snapshot(commits):
    for name in ("", *commits):
        (CACHE / "snapshots" / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"holds {len(commits)} snapshots"):
        snapshot_in(CACHE)
    assert snapshot_in(Path()) == Path()
    if commits:
        write_files(CACHE / "refs", {"main": commits[1]})
        assert snapshot_in(CACHE) == CACHE / "snapshots" / commits[1]


HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"hub/models--org--na-me_1.5/snapshots/{HASH}", {"path": "org/na-me_1.5", "revision": HASH}),
        (f"models--gpt2/snapshots/{HASH}", {"path": "gpt2", "revision": HASH}),
        (
            f"models--org--name/snapshots/{HASH}/0_Transformer",
            {"path": "org/name", "revision": HASH, "subfolder": "0_Transformer"},
        ),
        ("models--org--name", {"path": "models--org--name"}),
        ("other/snapshots/mine", {"path": "mine"}),
        ("snapshots/mine", {"path": "mine"}),
        ("mine/../yours", {"path": "yours"}),
    ],
)
def test_origin(tmp_path, path, expected):
    assert origin(tmp_path / path) == expected


def test_links_are_followed(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--org--name" / "snapshots" / HASH
    tiny_nllb_moe(snapshot)
    (tmp_path / "short").symlink_to(snapshot)
    monkeypatch.chdir(snapshot)
    for path in (tmp_path / "short", Path()):
        checkpoint = open_model(path)
        assert named(checkpoint) == {
            "path": "org/name",
            "revision": HASH,
            "fingerprint": checkpoint.fingerprint,
        }
