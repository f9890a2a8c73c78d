"""Layer by layer, the statistics are those of a run in memory, to the last bit."""

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli.methods.experts.batches import CollectOptions, Translation
from prunecli.methods.experts.collect import score
from prunecli.model.checkpoint import open_model
from prunecli.modules import grouped
from prunecli.modules.loading import load_model
from prunecli.progress import Progress
from prunecli.results.gates import GateStatistics
from prunecli.running.layerwise.runner import Layerwise, RunReport
from prunecli.running.layerwise.states import Snapshots
from prunecli.running.runner import InMemory
from prunecli.text.tokens import load_tokenizer
from tests.methods.experts.test_collect import PAIRS, TEXT
from tests.running.layerwise.running import StopError, no_room
from tests.tiny import tiny_nllb_moe

OPTIONS = CollectOptions(mode="forced", batch_tokens=40)
PLENTY = 64 << 30


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_nllb_moe(tmp_path_factory.mktemp("model") / "tiny", experts=16)


def translated(options: CollectOptions) -> Translation:
    return Translation(TEXT, PAIRS, options)


def in_memory(
    path: Path, options: CollectOptions = OPTIONS, dtype: str = "float32", material: Any = translated
) -> GateStatistics:
    with open_model(path) as checkpoint:
        held = InMemory(load_model(path, device="cpu", dtype=dtype))
        return score(held, checkpoint, load_tokenizer(path), material(options))


whole = functools.cache(in_memory)


def by_layer(
    path: Path, options: CollectOptions = OPTIONS, material: Any = translated, **more: Any
) -> GateStatistics:
    place = torch.device("cpu"), more.pop("dtype", torch.float32), PLENTY
    own = {name: more.pop(name) for name in ("snapshots", "process_group") if name in more}
    with open_model(path) as checkpoint:
        layers = Layerwise(checkpoint, *place, report=more.pop("report", None), **own)
        return score(layers, checkpoint, load_tokenizer(path), material(options), **more)


def assert_same(one: GateStatistics, other: GateStatistics) -> None:
    assert one.to_json() == other.to_json()


def test_the_same_statistics(path):
    options = CollectOptions(mode="forced", batch_tokens=20)
    report = RunReport()
    assert_same(by_layer(path, options, report=report), whole(path, options))
    assert report.readings == 1  # all sources share one reading of the encoder, all pairs one of the decoder
    with open_model(path) as checkpoint:
        assert 0 < report.bytes_read <= checkpoint.total_bytes


def test_experts_shared_out_to_threads(path, monkeypatch):
    monkeypatch.setattr(grouped, "MIN_EXPERTS", 2)
    monkeypatch.setattr(grouped, "MIN_WEIGHT_BYTES", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_same(by_layer(path, dtype=torch.bfloat16), whole(path, dtype="bfloat16"))
    finally:
        torch.set_num_threads(before)


def test_groups_where_there_is_no_room_for_all(path, monkeypatch):
    no_room(monkeypatch, 30_000, 0)
    report, seen = RunReport(), []
    assert_same(by_layer(path, report=report, save=seen.append), whole(path))
    assert report.readings == len(seen) > 1
    assert [state.batches for state in seen] == sorted({state.batches for state in seen})


def test_an_interrupted_run_goes_on_from_its_last_group(path, monkeypatch):
    no_room(monkeypatch, 30_000, 0)
    seen = []

    def stop(state):
        seen.append(state)
        raise StopError

    with pytest.raises(StopError):
        by_layer(path, save=stop)
    assert_same(by_layer(path, state=seen[0]), whole(path))
    # What was begun by layers may be gone on with in memory, and the other way round.
    with open_model(path) as checkpoint:
        held = InMemory(load_model(path, device="cpu"))
        found = score(
            held, checkpoint, load_tokenizer(path), Translation(TEXT, PAIRS, OPTIONS), state=seen[0]
        )
    assert_same(found, whole(path))


def stopping(after: int) -> Progress:
    """A progress that fails when so much is done."""

    def begin(*_: Any) -> Any:
        steps: list[float] = []

        def advance(amount: float) -> None:
            steps.append(amount)
            if sum(steps) > after:
                raise StopError

        return nullcontext(advance)

    return begin


def test_an_interrupted_run_goes_on_from_its_last_layer(path, tmp_path):
    key = {"run": [1, (2, 3)]}
    with pytest.raises(StopError):
        by_layer(path, progress=stopping(10), snapshots=Snapshots(tmp_path / "states", key, 0.0))
    left = Snapshots(tmp_path / "states", key)
    steps = []
    report = RunReport()
    again = by_layer(path, snapshots=left, report=report, progress=recording(steps))
    assert_same(again, whole(path))
    with open_model(path) as checkpoint:
        assert report.bytes_read < 0.95 * checkpoint.total_bytes
    assert steps[0] > 1
    plain = []
    by_layer(path, progress=recording(plain))
    assert sum(steps) == sum(plain) == len(plain)


def recording(steps: list[float]) -> Progress:
    """A progress that writes every step down."""
    return lambda *_: nullcontext(steps.append)


def test_states_of_another_run_are_not_used(path, tmp_path):
    with pytest.raises(StopError):
        by_layer(path, progress=stopping(30), snapshots=Snapshots(tmp_path / "states", {"run": 1}, 0.0))
    other = Snapshots(tmp_path / "states", {"run": 2})
    assert other.group_size(0) is None
    assert_same(by_layer(path, snapshots=other), whole(path))
