"""Models of the hub that are read by ranges: what crosses the wire, and what a rewrite of them gives."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download

from prunecli.errors import HubError, UsageError
from prunecli.methods.options import ExpertOptions
from prunecli.model import streamed
from prunecli.model.checkpoint import open_model
from prunecli.model.streamed import stream_model
from prunecli.pipeline import apply
from prunecli.tensors import copying, writer
from prunecli.tensors.hub.fetch import local_directory
from prunecli.tensors.transaction import NAME, Store
from tests.contracts.method_contract import digests, made_of
from tests.forked import ended, start
from tests.hub_server import MAIN_COMMIT, Fault, hub
from tests.stock_mixtures import tiny_mixture
from tests.tiny import tiny_nllb_moe

__all__ = ["hub"]

SHARD = 60_000
"""Bytes of a file of the results, of which there are several."""


@pytest.fixture
def source(monkeypatch, hub):
    """`org/tiny` on the hub, of three files; its requests are small."""
    monkeypatch.setattr(copying, "REQUEST_BYTES", 10_000)
    directory = tiny_nllb_moe("source", shards=3, experts=16)
    hub.add("org/tiny", directory)
    return directory


def prune(opened, output, ratio=0.5, shard_bytes=SHARD, **options):
    """Half of the experts, at random."""
    chosen = ExpertOptions(metric="random", ratio=ratio)
    rewrite = made_of(opened, chosen)
    return apply(opened, rewrite, output, shard_bytes=shard_bytes, **options)


def pruned_locally(**options):
    prune(open_model("org/tiny"), Path("local"), **options)
    return digests("local")


def hidden():
    return sorted(path.name for path in Path().iterdir() if path.name.startswith("."))


def kept_bytes(output):
    """Bytes of all tensors of a result."""
    return open_model(output).total_bytes


def overhead(source):
    """Bytes beside the kept ones: headers of the source's files, and 16 values of each tensor."""
    headers = 0
    for path in source.glob("*.safetensors"):
        headers += 8 + int.from_bytes(path.read_bytes()[:8], "little")
    return headers + sum(16 * 4 for _ in open_model(source).tensors)


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_the_result_is_that_of_a_local_run_and_only_what_stays_crosses_the_wire(
    source, hub, monkeypatch, dtype
):
    monkeypatch.setattr(streamed, "HEADER_BYTES", 8)
    monkeypatch.setattr(streamed, "SAMPLES_GAP", 0)
    monkeypatch.setattr(copying, "GAP_BYTES", 0)
    chosen = ExpertOptions(metric="random", ratio=0.75, dtype=dtype)
    said, sent = [], 0
    for name in ("streamed", "local"):
        opening = stream_model("org/tiny", say=said.append) if name == "streamed" else open_model("org/tiny")
        with opening as opened:
            rewrite = made_of(opened, chosen)
            apply(opened, rewrite, name, shard_bytes=SHARD)
            if name == "streamed":
                assert sum(opened.traffic) == hub.sent
                assert not list(Path("cache").rglob("*0?.safetensors"))
                sent = hub.sent
    assert digests("streamed") == digests("local")
    assert sent <= kept_bytes(Path("local")) * (1 if dtype is None else 2) + overhead(source)
    assert sent < 0.55 * sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert said[-1].startswith(f"Streaming org/tiny at {MAIN_COMMIT[:7]} from {hub.url[7:]}: of ")
    assert hidden() == []


def test_what_is_near_each_other_comes_with_one_request(source, monkeypatch):
    requests = []
    monkeypatch.setattr(copying, "REQUEST_BYTES", 1 << 20)
    for gap in (0, 1 << 20):
        monkeypatch.setattr(copying, "GAP_BYTES", gap)
        with stream_model("org/tiny") as opened:
            _ = opened.fingerprint
            before = len(opened.traffic)
            prune(opened, f"out-{gap}")
            requests.append(len(opened.traffic) - before)
    assert requests[1] < requests[0] / 2
    assert digests("out-0") == digests(f"out-{1 << 20}")


def test_values_and_fingerprint_are_those_of_the_files(source):
    with stream_model("org/tiny") as far, open_model(source) as near:
        assert far.fingerprint == near.fingerprint
        assert dict(far.tensors) == dict(near.tensors)
        assert list(far.tensors) == list(near.tensors)
        name = "model.encoder.layers.1.ffn.experts.expert_3.fc1.weight"
        assert (far.read(name) == near.read(name)).all()
        assert far.total_bytes == near.total_bytes
        assert [far.file_bytes(path) for path in far.files] == [near.file_bytes(path) for path in near.files]


def test_of_stacked_experts_those_that_stay_cross_the_wire(source, hub, monkeypatch):
    monkeypatch.setattr(copying, "GAP_BYTES", 0)
    tiny_mixture("gpt_oss").save_pretrained("stacked")
    hub.add("org/stacked", Path("stacked"))
    with stream_model("org/stacked") as opened:
        _ = opened.fingerprint
        before = hub.sent
        prune(opened, "streamed")
    assert hub.sent - before == kept_bytes(Path("streamed"))
    prune(open_model("org/stacked"), "local")
    assert digests("streamed") == digests("local")


def test_a_model_in_the_cache_is_opened_there(source, hub):
    local_directory("org/tiny")
    hub.requests.clear()
    said = []
    with stream_model("org/tiny", say=said.append) as opened:
        assert not opened.is_remote
    assert hub.fetched() == []
    assert said == ["org/tiny at 1a2b3c4 is in the cache and read from there."]


class Ending:
    """A progress that does something once when this share of the bytes is fetched."""

    def __init__(self, share, end):
        self.share, self.end = share, end

    def __call__(self, description, total=None, unit="steps"):
        self.left = self.share * total if description == "fetching" else float("inf")
        return self

    def __enter__(self):
        return self.advance

    def __exit__(self, *_):
        pass

    def advance(self, amount):
        self.left -= amount
        if self.left <= 0:
            self.left = float("inf")
            self.end()


def raising(error):
    def end():
        raise error

    return end


@pytest.fixture
def unfinished(source, hub):
    """A run that the network ended, when a few files of its result were complete."""
    with stream_model("org/tiny") as opened:
        _ = opened.fingerprint

        def end():
            hub.faults = [Fault(status=500)] * 1000

        with pytest.raises(HubError, match=r"answers .*\(500\)"):
            prune(opened, "out", progress=Ending(0.7, end))
    hub.faults = []
    hub.sent = 0
    (left,) = hidden()
    assert left.startswith(f".out.{os.getpid()}-")
    return Path(left)


def kept_records(directory):
    """The records of the store in a directory: file -> bytes, steps, digest of the steps."""
    lines = (directory / NAME).read_text().split("\n")[1:]
    return {name: value for _, name, value in (json.loads(line)["record"] for line in lines)}


@pytest.mark.parametrize("changed", ["nothing", "cache", "note"])
def test_a_file_goes_on_where_it_was(source, hub, monkeypatch, changed):
    monkeypatch.setattr(writer, "NOTE_BYTES", 20_000)
    monkeypatch.setattr(copying, "GAP_BYTES", 0)
    said = []
    end = Ending(0.7, raising(SystemExit(143)))
    with stream_model("org/tiny") as opened, pytest.raises(SystemExit):
        prune(opened, "out", shard_bytes=1 << 30, progress=end, say=said.append)
    assert re.fullmatch(r"Kept .* KiB of the result: the same command resumes from there\.", *said)
    (left,) = hidden()
    assert sorted(path.name for path in Path(left).iterdir()) == [NAME, "model.safetensors"]
    ((nbytes, steps, _),) = kept_records(Path(left)).values()
    if changed == "note":
        store = Path(left) / NAME
        store.write_text(store.read_text().replace(f", {steps}, ", f", {steps + 1}, "))
    if changed == "cache":  # what lies here is read in other steps
        hf_hub_download("org/tiny", "model-00001-of-00003.safetensors", revision=MAIN_COMMIT)
    said = []
    with stream_model("org/tiny") as opened:
        _ = opened.fingerprint
        before = hub.sent
        prune(opened, "out", shard_bytes=1 << 30, say=said.append)
        if changed == "nothing":
            assert hub.sent - before <= kept_bytes(Path("out")) - nbytes + 1_000
    assert nbytes > 0.5 * kept_bytes(Path("out"))
    assert changed == "note" or said[0].startswith("Resuming from an ended run: ")
    assert hidden() == []
    assert digests("out") == pruned_locally(shard_bytes=1 << 30)


def test_another_run_does_not_go_on_from_it(unfinished):
    said = []
    with stream_model("org/tiny") as opened:
        prune(opened, "out", ratio=0.25, say=said.append)
    assert said == []
    assert hidden() == []


@pytest.mark.parametrize("change", ["cut", "link", "journal", "outside"])
def test_what_is_not_whole_is_written_again(unfinished, change):
    first = unfinished / next(iter(kept_records(unfinished)))
    if change == "cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif change == "link":
        first.rename("elsewhere")
        first.symlink_to(Path("elsewhere").resolve())
    elif change == "journal":
        (unfinished / NAME).write_text("[" * 10_000)
    else:
        work = json.loads((unfinished / NAME).read_text().split("\n")[1])["record"][0]
        nbytes = Path("source/config.json").stat().st_size
        Store(unfinished / NAME, work).put("../source/config.json", [nbytes, 0, ""])
    with stream_model("org/tiny") as opened:
        prune(opened, "out")
    assert digests("out") == pruned_locally()
    assert Path("source/config.json").exists()
    assert hidden() == []


@pytest.mark.parametrize(
    ("error", "kept"), [(KeyboardInterrupt(), False), (SystemExit(143), True), (OSError(28, "full"), False)]
)
def test_what_an_end_leaves(source, error, kept):
    with stream_model("org/tiny") as opened, pytest.raises(BaseException) as caught:
        prune(opened, "out", progress=Ending(0.7, raising(error)))
    assert caught.type is type(error) or "disk is full" in str(caught.value)
    assert len(hidden()) == kept


KILLED = """
import os, signal, sys
from pathlib import Path
import pytest
from tests.hub_server import point_at
point_at(sys.argv[1], Path("cache"), pytest.MonkeyPatch())
from prunecli.model.streamed import stream_model
from tests.model.test_streamed import Ending, prune
from prunecli.tensors import copying
copying.REQUEST_BYTES = 10_000
with stream_model("org/tiny") as opened:
    prune(opened, "out", progress=Ending(0.7, lambda: os.kill(os.getpid(), signal.SIGKILL)))
"""


def test_a_killed_run_goes_on(source, hub):
    ((status, _, said),) = ended(start(hub.url, code=KILLED, processes=1))
    assert status == -signal.SIGKILL, said
    lock, left = hidden()
    assert lock == f"{left.removesuffix('partial')}lock"
    assert kept_records(Path(left))
    said = []
    with stream_model("org/tiny") as opened:
        prune(opened, "out", say=said.append)
    assert said[0].startswith("Resuming")
    assert digests("out") == pruned_locally()
    assert hidden() == []


def test_what_cannot_be_streamed(source, hub):
    with pytest.raises(UsageError, match=r"reads a model of the hub where it is; source is a path"):
        stream_model("source")
    hub.add("org/pickled", tiny_nllb_moe("pickled", pickled=True))
    with pytest.raises(HubError, match=r"^org/pickled: its weights are pickled \(pytorch_model.bin, "):
        stream_model("org/pickled")
    assert "pytorch_model.bin" not in hub.fetched()
