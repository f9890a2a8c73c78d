"""Fetching from a hub on loopback: what is asked, what is said, what goes wrong."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest

from prunecli.errors import HubError, OutputError
from prunecli.model.checkpoint import open_model
from prunecli.tensors.hub.fetch import commit_of, local_directory, needed_files, weight_files
from prunecli.tensors.hub.names import HubName
from tests.commands.calls import names
from tests.families import tiny_family
from tests.hub_server import MAIN_COMMIT, hub, point_at
from tests.tiny import json_of, tiny_nllb_moe

__all__ = ["hub"]

OTHER_COMMIT = "b" * 40
CACHE = Path("cache")
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def model(hub):
    """`org/tiny` on the hub, in three shards, with files that nobody needs."""
    directory = tiny_nllb_moe("source", shards=3)
    for name in ("flax_model.msgpack", "onnx/model.onnx", ".gitattributes"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"0" * 1000)
    hub.add("org/tiny", directory)
    return directory


class Said(list):
    """The lines that a user would see, and the amounts that a bar would."""

    def __init__(self):
        self.amounts = []

    @contextmanager
    def progress(self, description, total, unit):
        self.amounts.append((description, total, unit))
        yield self.amounts.append


def _directory(name):
    said = Said()
    return local_directory(name, say=said.append, progress=said.progress), said


def test_a_model_is_fetched_as_it_is(model, hub):
    directory, said = _directory("org/tiny")
    assert directory == Path("cache/models--org--tiny/snapshots", MAIN_COMMIT).resolve()
    one = open_model(model)
    other = open_model(directory)
    assert one.fingerprint == other.fingerprint
    assert all(np.array_equal(one.read(name), other.read(name)) for name in one.tensors)
    carried = ([path.name for path in opened.side_files.carried] for opened in (one, other))
    assert next(carried) == next(carried)
    size = sum(path.stat().st_size for path in directory.iterdir() if path.name != "config.json")
    index = (directory / "model.safetensors.index.json").stat().st_size
    assert len(said) == 1
    assert said[0].startswith(f"Fetching org/tiny at 1a2b3c4 from {hub.url[7:]}: 6 files, ")
    assert said[0].endswith(f"into {CACHE.resolve()}")
    assert said.amounts[0] == ("org/tiny: fetching", size - index, "bytes")
    assert sum(said.amounts[1:]) == size - index
    assert set(hub.fetched()) == {path.name for path in directory.iterdir()}
    assert not {"flax_model.msgpack", "onnx/model.onnx", ".gitattributes"} & set(hub.fetched())


def test_what_is_there_is_not_fetched_again(model, hub):
    _directory("org/tiny")
    hub.requests.clear()
    directory, said = _directory("org/tiny")
    assert hub.requests == ["GET /api/models/org/tiny"]
    assert said == []
    (directory / "generation_config.json").unlink()
    _, said = _directory("org/tiny")  # its content lies in the cache still
    assert said == []
    (directory / "tokenizer.json").resolve().unlink()
    _, said = _directory("org/tiny")
    assert ": tokenizer.json, " in said[0]


def test_revisions(model, hub):
    hub.add("org/tiny", tiny_nllb_moe("other", seed=1), OTHER_COMMIT, "refs/pr/3")
    hub.revisions["org/tiny", "v1.0"] = MAIN_COMMIT
    main, _ = _directory("org/tiny")
    for name, commit in (
        ("org/tiny@refs/pr/3", OTHER_COMMIT),
        (f"org/tiny@{OTHER_COMMIT}", OTHER_COMMIT),
        ("org/tiny@v1.0", MAIN_COMMIT),
        ("org/tiny@main", MAIN_COMMIT),
    ):
        directory, _ = _directory(name)
        assert directory == main.parent / commit
        assert commit_of(HubName(*name.split("@"))) == commit
    assert open_model("org/tiny").fingerprint != open_model("org/tiny@refs/pr/3").fingerprint


def test_a_branch_that_moves_is_followed_and_known_offline(model, hub, monkeypatch):
    _directory("org/tiny")
    changed = {**hub.models["org/tiny"][MAIN_COMMIT], "README.md": b"# new\n"}
    hub.add("org/tiny", changed, OTHER_COMMIT)
    hub.requests.clear()
    directory, said = _directory("org/tiny")
    assert directory.name == OTHER_COMMIT
    assert hub.fetched() == ["README.md"]  # of the others the content is there
    assert ": README.md, 6 B, " in said[0]
    point_at(NOWHERE, CACHE, monkeypatch, offline=True)
    assert _directory("org/tiny")[0].name == OTHER_COMMIT
    assert _directory(f"org/tiny@{MAIN_COMMIT}")[0].name == MAIN_COMMIT


@pytest.mark.parametrize("offline", [True, False])
def test_the_cache_opens_without_a_network(model, hub, monkeypatch, offline):
    directory, _ = _directory("org/tiny")
    point_at(NOWHERE, CACHE, monkeypatch, offline=offline)
    found, said = _directory("org/tiny")
    assert found == directory
    line = "127.0.0.1:9 cannot be reached: using org/tiny at 1a2b3c4 from the cache."
    assert said == ([] if offline else [line])
    commit_of.cache_clear()
    assert commit_of(HubName("org/tiny")) == MAIN_COMMIT


@pytest.mark.parametrize(
    ("lacking", "offline"),
    [("all", True), ("config.json", True), ("model-00002-of-00003.safetensors", False)],
)
def test_what_is_not_whole_in_the_cache_is_refused_without_a_network(
    model, hub, monkeypatch, offline, lacking
):
    directory, _ = _directory("org/tiny")
    if lacking == "all":
        shutil.rmtree(CACHE)
    else:
        (directory / lacking).unlink()
    point_at(NOWHERE, CACHE, monkeypatch, offline=offline)
    message = "HF_HUB_OFFLINE forbids" if offline else r"127\.0\.0\.1:9 cannot be reached .*refused"
    with pytest.raises(HubError, match=rf"^org/tiny: no such directory here.*{message}.*\n.*$"):
        _directory("org/tiny")


@pytest.mark.parametrize(
    ("status", "code", "message", "remedy"),
    [
        (404, "RepoNotFound", "no such model on .*, or a private one", "hf auth login"),
        (401, "", "no such model on .*, or a private one", "HF_TOKEN"),
        (403, "GatedRepo", "give access on request", "/org/tiny, then log in with `hf auth login`"),
        (403, "", r"gives no permission \(403\)", "hf auth login"),
        (429, "", "too many requests", "later"),
        (503, "", "answers with an error", "HF_HUB_OFFLINE=1"),
    ],
)
@pytest.mark.parametrize("what", ["refused", "refused_files"])
def test_refusals_of_a_model_or_its_files(model, hub, what, status, code, message, remedy):
    """A model behind a gate is described to everyone."""
    getattr(hub, what)["org/tiny"] = status, code
    with pytest.raises(HubError, match=rf"^org/tiny: .*{message}.*\n.*{remedy}.*$"):
        _directory("org/tiny")


def test_a_model_that_is_refused_now_opens_from_the_cache(model, hub):
    _directory("org/tiny")
    hub.refused["org/tiny"] = 403, ""
    directory, said = _directory("org/tiny")
    assert directory.name == MAIN_COMMIT
    assert said == [f"{hub.url[7:]} gives no permission (403): using org/tiny at 1a2b3c4 from the cache."]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model.safetensors": b""}, r"holds weights and no config\.json"),
        ({"config.json": b"{}", "model.gguf": b"0"}, "holds weights of llama.cpp, in GGUF"),
        ({"config.json": b"{}", "adapter_config.json": b"[1]"}, "an adapter"),
        ({"config.json": b"{}", "model.safetensors.index.json": b"{"}, "index.json is not JSON"),
    ],
)
def test_what_is_no_checkpoint_is_refused_before_it_is_fetched(model, hub, files, message):
    hub.add("org/odd", files)
    with pytest.raises(HubError, match=f"^org/odd: .*{message}"):
        _directory("org/odd")
    assert not {"model.safetensors", "model.gguf"} & set(hub.fetched())


def test_a_download_that_breaks_off_resumes_where_it_was(model, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    shard = "model-00002-of-00003.safetensors"
    hub.cuts[shard] = [5000, 3000]
    directory, _ = _directory("org/tiny")
    assert (directory / shard).read_bytes() == (model / shard).read_bytes()
    ranges = [line for line in hub.requests if line.startswith("GET") and shard in line and "=" in line]
    assert [line.split()[2] for line in ranges] == ["bytes=5000-", "bytes=8000-"]


def test_a_download_that_breaks_off_for_good_goes_on_with_the_next_command(model, hub):
    shard = "model-00002-of-00003.safetensors"
    hub.cuts[shard] = [0] * 20
    with pytest.raises(HubError, match=r"^org/tiny: "):
        _directory("org/tiny")
    hub.cuts.clear()
    hub.requests.clear()
    _, said = _directory("org/tiny")
    assert ": 2 files, " in said[0]
    assert hub.fetched() == [shard, "model-00003-of-00003.safetensors"]


def test_an_interrupt_is_said_and_loses_nothing_that_is_complete(model, hub, monkeypatch):
    fetch, last = huggingface_hub.hf_hub_download, "model-00003-of-00003.safetensors"

    def interrupted(repo, file, **options):
        if file == last:
            raise KeyboardInterrupt
        return fetch(repo, file, **options)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", interrupted)
    said = Said()
    with pytest.raises(KeyboardInterrupt):
        local_directory("org/tiny", say=said.append)
    assert said[1:] == ["Complete files are kept in the cache: the same command resumes from there."]


def test_a_full_disk_is_refused_before_anything_large_is_fetched(model, hub, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Mock(free=1000))
    with pytest.raises(OutputError, match=r"org/tiny: .* 1000 B are free there\n.*HF_HUB_CACHE"):
        _directory("org/tiny")
    assert set(hub.fetched()) == {"config.json", "model.safetensors.index.json"}


@pytest.fixture
def answers_model(hub):
    hub.add("org/tiny", {"config.json": b"{}", "model.safetensors": b"x"})
    return hub


def refused(message: str) -> None:
    """With a line, and without a file anywhere but in the cache."""
    with pytest.raises(HubError, match=rf"^org/tiny(@\w+)?: .*{message}.*(\n.*)?$"):
        local_directory("org/tiny")
    assert {*names()} <= {"cache"}
    assert {path.name for path in CACHE.glob("*")} <= {"models--org--tiny", ".locks", "CACHEDIR.TAG"}


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag"])
@pytest.mark.parametrize("value", ['"../../../out"', '"/tmp/out"', 'W/"a/b"', '".."', "a" * 300])
def test_names_of_contents_are_no_paths(answers_model, header, value):
    answers_model.headers["config.json"] = {header: value}
    refused(f"config.json: 127.0.0.1.* answers with (?i:{header})")


def test_nor_are_commits(answers_model):
    answers_model.headers["config.json"] = {"X-Repo-Commit": "../../out"}
    refused("answers with X-Repo-Commit '../../out'")


@pytest.mark.parametrize(
    "answer",
    [
        "<html>Log in</html>",
        '"a text"',
        '{"id": "org/tiny", "sha": "a", "siblings": [{"rfilename": ["config.json"]}]}',
        '{"id": "org/tiny", "sha": "a", "siblings": [{"rfilename": "config.json", "size": "large"}]}',
    ],
)
def test_what_describes_no_model(answers_model, answer):
    """A page to log in to a network, and descriptions that huggingface_hub takes as they are."""
    answers_model.description = answer.encode()
    refused("describes no model")
    assert answers_model.fetched() == []


@pytest.mark.parametrize("name", ["../../../../out", "../../../../../out"])
def test_names_of_files_do_not_lead_out_of_the_cache(answers_model, name):
    index = json.dumps({"weight_map": {"a": name}}).encode()
    answers_model.add("org/tiny", {"config.json": b"{}", "model.safetensors.index.json": index, name: b"x"})
    refused("")


def test_a_size_that_huggingface_hub_does_not_fetch(answers_model):
    answers_model.headers["model.safetensors"] = {"X-Linked-Size": str(10**11)}
    refused("model.safetensors: it cannot be fetched .*too large")


SIDE = (".gitattributes", "README.md", "config.json", "spiece.model", "tokenizer.json", "preview.png")
OTHER_FORMATS = (
    "flax_model.msgpack tf_model.h5 model.gguf rust_model.ot onnx/model.onnx onnx/config.json training_args.bin "
    "original/consolidated.00.pth consolidated.safetensors openvino/openvino_model.bin"
)


def test_one_format_of_the_weights_and_the_side_files():
    held = [*SIDE, *OTHER_FORMATS.split(), "model.safetensors", "pytorch_model.bin"]
    files = needed_files(dict.fromkeys(held, 1), Mock(side_effect=AssertionError))
    assert files == (*sorted(set(SIDE) - {".gitattributes"}), "model.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_index_decides_which_shards(name):
    stem, _, ending = name.partition(".")
    index = {"weight_map": {"a": f"{stem}-1.{ending}", "b": f"{stem}-2.{ending}", "c": f"{stem}-1.{ending}"}}
    held = [*SIDE, f"{name}.index.json", *(f"{stem}-{number}.{ending}" for number in (1, 2, 3))]
    files = needed_files(dict.fromkeys(held, 1), {f"{name}.index.json": index}.__getitem__)
    assert files[-3:] == (f"{name}.index.json", f"{stem}-1.{ending}", f"{stem}-2.{ending}")
    assert f"{stem}-3.{ending}" not in files


def test_what_is_fetched_is_what_a_directory_of_the_same_files_carries():
    directory = tiny_family("model", "bert")
    extra = ["images/a.txt", "checkpoint-5/a.json", "corpus.zip", "adapter_config.json", ".x/y"]
    extra += OTHER_FORMATS.split()
    for name in [*extra, "1_Dense/config.json", "1_Dense/pytorch_model.bin", "1_Dense/model.safetensors"]:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("x")
    (directory / "modules.json").write_text('[{"path": "1_Dense"}]')
    files = [path for path in directory.rglob("*") if path.is_file()]
    held = {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
    fetched = needed_files(held, lambda name: json_of(directory / name))
    carried = {path.relative_to(directory).as_posix() for path in open_model(directory).side_files.carried}
    assert {"images/a.txt", "1_Dense/model.safetensors"} <= carried
    assert set(fetched) == carried | {"config.json", "model.safetensors"}


@pytest.mark.parametrize("index", [[], {}, {"weight_map": 3}, {"weight_map": {"a": None}}])
def test_what_is_wrong_with_an_index_is_left_to_the_reader(index):
    assert weight_files(["model.safetensors.index.json"], lambda _name: index) == (
        "model.safetensors.index.json",
    )
