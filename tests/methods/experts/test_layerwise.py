"""Layer by layer, and by several processes, the statistics are those of one run in memory, to the last bit."""

import errno
import functools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli.errors import PruneError
from prunecli.methods.experts.batches import CollectOptions, Translation
from prunecli.methods.experts.collect import score
from prunecli.model.checkpoint import open_model
from prunecli.modules import grouped
from prunecli.modules.loading import load_model
from prunecli.processes import ALONE, ProcessGroup
from prunecli.progress import Progress
from prunecli.results.gates import GateStatistics
from prunecli.running import runner
from prunecli.running.layerwise import states as snapshot
from prunecli.running.layerwise.runner import Layerwise, RunReport
from prunecli.running.layerwise.states import Snapshots
from prunecli.running.runner import InMemory
from prunecli.text.tokens import load_tokenizer
from tests.methods.experts.test_collect import MODES, PAIRS, TEXT
from tests.process_groups import at_once
from tests.running.layerwise.running import StopError, no_room
from tests.tiny import tiny_nllb_moe

FORCED = Translation(TEXT, PAIRS, MODES[0])
BEAM = Translation(TEXT, PAIRS[:1], CollectOptions(mode="beam", beam=2, batch_tokens=40))  # takes seconds
PLENTY = 64 << 30


@pytest.fixture(scope="module")
def path(shared_path):
    few = {"max_position_embeddings": 16}  # at which endless searches end
    return tiny_nllb_moe(shared_path / "tiny", experts=16, config=few)


def in_memory(
    path: Path, material: Any = FORCED, dtype: str = "float32", group: ProcessGroup = ALONE, **more: Any
) -> GateStatistics:
    held = InMemory(load_model(path, device="cpu", dtype=dtype), group)
    return score(held, open_model(path), load_tokenizer(path), material, **more)


whole = functools.cache(in_memory)


def by_layer(path: Path, material: Any = FORCED, dtype: str = "float32", **more: Any) -> GateStatistics:
    own = {name: more.pop(name) for name in ("snapshots", "process_group") if name in more}
    checkpoint = open_model(path)
    layers = Layerwise(checkpoint, torch.device("cpu"), getattr(torch, dtype), PLENTY, **own)
    layers.report = more.pop("report", layers.report)
    return score(layers, checkpoint, load_tokenizer(path), material, **more)


def assert_same(one: GateStatistics, other: GateStatistics) -> None:
    assert one.to_json() == other.to_json()


def assert_all_same(found: list[Any], whole: GateStatistics) -> None:
    for one in found:
        assert not isinstance(one, BaseException), one
        assert_same(one, whole)


def test_the_same_statistics(path):
    smaller = replace(FORCED, options=MODES[0].updated(batch_tokens=20))
    report = RunReport()
    assert_same(by_layer(path, smaller, report=report), in_memory(path, smaller))
    assert report.readings == 1  # all sources share one reading of the encoder, all pairs one of the decoder
    assert 0 < report.bytes_read <= open_model(path).total_bytes


def test_experts_shared_out_to_threads(path, monkeypatch):
    monkeypatch.setattr(grouped, "MIN_EXPERTS", 2)
    monkeypatch.setattr(grouped, "MIN_WEIGHT_BYTES", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_same(by_layer(path, dtype="bfloat16"), in_memory(path, dtype="bfloat16"))
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
    assert_same(in_memory(path, state=seen[0]), whole(path))


def stopping(after: int) -> Progress:
    """A progress that fails when so much is done."""

    def begin(*_: Any) -> Any:
        steps = []

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
    assert report.bytes_read < 0.95 * open_model(path).total_bytes
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


# By several processes: whatever their number, however often begun.


@pytest.mark.parametrize(("material", "count", "apart"), [(FORCED, 9, 4), (BEAM, 2, 2)])
def test_several_in_memory(path, material, count, apart, monkeypatch):
    monkeypatch.setattr(runner, "BATCHES_APART", apart)
    assert_all_same(
        at_once(count, lambda group: in_memory(path, material, group=group)), in_memory(path, material)
    )


def test_another_number_of_processes_goes_on(path, monkeypatch):
    monkeypatch.setattr(runner, "BATCHES_APART", 1)
    states = []

    def begin(group):
        return in_memory(path, group=group, save=states.append if group.is_main else lambda _state: None)

    at_once(3, begin)
    assert len(states) > 1
    done = states[0]
    assert done.batches == 3
    assert_all_same(at_once(2, lambda group: in_memory(path, group=group, state=done)), whole(path))


def interrupted(path: Path, folder: Path, after: int) -> None:
    """Run until the first has done so much."""

    def begin(group: ProcessGroup) -> Any:
        more = {"progress": stopping(after)} if group.is_main else {}
        return by_layer(path, process_group=group, snapshots=snapshots(folder, group, 0.0), **more)

    found = at_once(2, begin)
    assert isinstance(found[1], PruneError)


def snapshots(folder: Path, group: ProcessGroup, every_s: float = 1e9) -> Snapshots:
    return Snapshots(folder / f"states.{group.rank}of{group.world_size}", {"run": 1}, every_s, group)


def begun_again(path: Path, folder: Path) -> tuple[list[Any], list[RunReport], list[int | None]]:
    works, sizes = [RunReport() for _ in range(2)], []

    def go_on(group: ProcessGroup) -> Any:
        kept = snapshots(folder, group)
        sizes.append(kept.group_size(0))
        return by_layer(path, process_group=group, snapshots=kept, report=works[group.rank])

    return at_once(2, go_on), works, sizes


def test_an_interrupted_run_of_several_goes_on_from_its_last_layer(path, tmp_path):
    interrupted(path, tmp_path, 14)
    found, works, sizes = begun_again(path, tmp_path)
    assert_all_same(found, whole(path))
    plain = RunReport()
    by_layer(path, report=plain)
    assert None not in sizes
    assert all(work.bytes_read < plain.bytes_read for work in works)


def test_a_kill_between_the_files_of_two_processes_loses_no_layer(path, tmp_path):
    """One file has taken its place, the other has not yet."""
    interrupted(path, tmp_path, 5)
    early = (tmp_path / "states.1of2").read_bytes()
    interrupted(path, tmp_path, 9)
    (tmp_path / "states.1of2").rename(tmp_path / "states.1of2.next")
    (tmp_path / "states.1of2").write_bytes(early)
    found, _, sizes = begun_again(path, tmp_path)
    assert None not in sizes
    assert_all_same(found, whole(path))


def test_one_that_cannot_write_keeps_the_others_from_it(path, tmp_path, monkeypatch):
    real = snapshot.write_snapshot

    def write(path, *more):
        if "1of2" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *more)

    monkeypatch.setattr(snapshot, "write_snapshot", write)
    interrupted(path, tmp_path, 9)
    assert list(tmp_path.iterdir()) == []
