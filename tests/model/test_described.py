"""Models of the hub that are described without their weights."""

import struct
from pathlib import Path

import pytest

from prunecli.errors import CheckpointError, HubError
from prunecli.model.checkpoint import open_model
from prunecli.model.described import describe_checkpoint
from prunecli.model.inventory import take_inventory
from prunecli.results.inspection import Inspection
from prunecli.tensors.hub.fetch import local_directory
from tests.hub_server import MAIN_COMMIT, hub, point_at
from tests.tiny import config_of, random_tensors, tiny_nllb_moe, write_weights

__all__ = ["hub"]


def _payload(checkpoint):
    payload = Inspection.of(checkpoint, take_inventory(checkpoint)).to_json()
    return {name: value for name, value in payload.items() if name != "models"}


@pytest.mark.parametrize("shards", [1, 3])
def test_a_description_is_what_the_directory_holds(hub, shards):
    source = tiny_nllb_moe("source", shards=shards, dtype="BF16")
    hub.add("org/tiny", source)
    said = []
    with describe_checkpoint("org/tiny", say=said.append) as described, open_model(source) as whole:
        assert dict(described.tensors) == dict(whole.tensors)
        assert list(described.tensors) == list(whole.tensors)
        assert _payload(described) == _payload(whole)
    assert "headers of org/tiny" in said[0] if shards > 1 else "the header of org/tiny" in said[0]
    contents = [line for line in hub.requests if line.startswith("GET") and ".safetensors" in line]
    assert len([line for line in contents if "bytes=" in line]) == shards
    assert all("bytes=" in line or line.endswith(".index.json") for line in contents)
    assert not list(Path("cache").rglob("*.safetensors"))


def test_long_headers_are_had_whole(hub):
    source = tiny_nllb_moe("source", experts=200)
    assert struct.unpack("<Q", (source / "model.safetensors").read_bytes()[:8])[0] > 100_000
    hub.add("org/tiny", source)
    with describe_checkpoint("org/tiny") as described, open_model(source) as whole:
        assert dict(described.tensors) == dict(whole.tensors)


def test_aliases_that_are_tied_count_once(hub):
    source = tiny_nllb_moe("source")
    tensors = random_tensors(config_of(source))
    (source / "model.safetensors").unlink()
    write_weights(source, {**tensors, "lm_head.weight": tensors["model.shared.weight"]})
    hub.add("org/tiny", source)
    with describe_checkpoint("org/tiny") as described, open_model(source) as whole:
        assert dict(described.tensors) == dict(whole.tensors)


def test_what_was_not_fetched_has_neither_values_nor_fingerprint(hub):
    hub.add("org/tiny", tiny_nllb_moe("source"))
    with describe_checkpoint("org/tiny") as described:
        (known,) = Inspection.header([described], None)["models"]
        assert known == {"path": "org/tiny", "revision": MAIN_COMMIT, "model_type": "nllb-moe"}
        with pytest.raises(CheckpointError, match="not fetched"):
            described.read("model.shared.weight")


def test_a_model_in_the_cache_is_opened_whole(tmp_path, hub, monkeypatch):
    source = tiny_nllb_moe("source", shards=2)
    hub.add("org/tiny", source)
    local_directory("org/tiny")
    hub.requests.clear()
    for _ in range(2):
        with describe_checkpoint("org/tiny") as described, open_model(source) as whole:
            assert described.fingerprint == whole.fingerprint
        assert hub.fetched() == []
        point_at(hub.url, tmp_path / "cache", monkeypatch, offline=True)


def test_pickles_are_not_fetched_unasked(hub):
    hub.add("org/pickled", tiny_nllb_moe("source", shards=3, pickled=True))
    with pytest.raises(HubError, match=r"its weights are pickled \(3 \.bin files, .* KiB\)") as caught:
        describe_checkpoint("org/pickled@main")
    assert "hf download org/pickled --revision main" in caught.value.remedy
    assert not [name for name in hub.fetched() if name.endswith(".bin")]
    local_directory("org/pickled@main")
    assert describe_checkpoint("org/pickled@main").is_local


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n" * 3, "its header would be .* bytes long"),
        (struct.pack("<Q", 2) + b"{]", "its header is not of the safetensors form"),
        (
            b"\x40" + bytes(7) + b'{"a":{"dtype":"F5","shape":[1],"data_offsets":[0,4]}, "x": 0   }',
            "is not of the safetensors form",
        ),
    ],
)
def test_damaged_headers_are_refused(hub, content, message):
    source = tiny_nllb_moe("source")
    (source / "model.safetensors").write_bytes(content)
    hub.add("org/tiny", source)
    with pytest.raises(HubError, match=f"^org/tiny: .*({message})"):
        describe_checkpoint("org/tiny")
