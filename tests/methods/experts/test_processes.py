"""Gate statistics by several processes: to the last bit those of one, whatever their number, however often begun."""

import errno
from pathlib import Path
from typing import Any

import pytest

from prunecli.errors import PruneError
from prunecli.methods.experts.batches import CollectOptions, Translation
from prunecli.methods.experts.collect import score
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from prunecli.processes import ALONE, ProcessGroup
from prunecli.results.gates import GateStatistics
from prunecli.running import runner
from prunecli.running.layerwise import states as snapshot
from prunecli.running.layerwise.runner import RunReport
from prunecli.running.layerwise.states import Snapshots
from prunecli.running.runner import InMemory
from prunecli.text.tokens import load_tokenizer
from tests.methods.experts.test_collect import PAIRS, TEXT
from tests.methods.experts.test_layerwise import by_layer as layerwise
from tests.methods.experts.test_layerwise import stopping
from tests.process_groups import at_once
from tests.tiny import tiny_nllb_moe

FORCED = CollectOptions(mode="forced", batch_tokens=40)
BEAM = CollectOptions(mode="beam", beam=2, batch_tokens=40)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    few = {"max_position_embeddings": 16}  # at which endless searches end
    return tiny_nllb_moe(tmp_path_factory.mktemp("model") / "tiny", experts=16, config=few)


@pytest.fixture(scope="module")
def whole(path):
    """Statistics of one process, forced."""
    return in_memory(path)


def in_memory(path: Path, options: CollectOptions = FORCED, group: ProcessGroup = ALONE, **more: Any) -> Any:
    with open_model(path) as checkpoint:
        runner = InMemory(load_model(path, device="cpu"), group)
        pairs = PAIRS if options.mode == "forced" else PAIRS[:1]  # a search of each batch takes seconds
        return score(runner, checkpoint, load_tokenizer(path), Translation(TEXT, pairs, options), **more)


def by_layer(path: Path, group: ProcessGroup = ALONE, **more: Any) -> GateStatistics:
    return layerwise(path, FORCED, process_group=group, **more)


def assert_same(found: list[Any], whole: GateStatistics) -> None:
    for one in found:
        assert not isinstance(one, BaseException), one
        assert one.to_json() == whole.to_json()


@pytest.mark.parametrize(("options", "count", "apart"), [(FORCED, 9, 4), (BEAM, 2, 2)])
def test_in_memory(path, options, count, apart, monkeypatch):
    monkeypatch.setattr(runner, "BATCHES_APART", apart)
    assert_same(at_once(count, lambda group: in_memory(path, options, group)), in_memory(path, options))


def test_another_number_of_processes_goes_on(path, whole, monkeypatch):
    monkeypatch.setattr(runner, "BATCHES_APART", 1)
    states = []

    def begin(group):
        return in_memory(path, group=group, save=states.append if group.is_main else lambda _state: None)

    at_once(3, begin)
    assert len(states) > 1
    done = states[0]
    assert done.batches == 3
    assert_same(at_once(2, lambda group: in_memory(path, group=group, state=done)), whole)


def interrupted(path: Path, folder: Path, after: int) -> None:
    """Run until the first has done so much."""

    def begin(group: ProcessGroup) -> Any:
        more = {"progress": stopping(after)} if group.is_main else {}
        return by_layer(path, group, snapshots=snapshots(folder, group, 0.0), **more)

    found = at_once(2, begin)
    assert isinstance(found[1], PruneError)


def snapshots(folder: Path, group: ProcessGroup, every_s: float = 1e9) -> Snapshots:
    return Snapshots(folder / f"states.{group.rank}of{group.world_size}", {"run": 1}, every_s, group)


def begun_again(path: Path, folder: Path) -> tuple[list[Any], list[RunReport], list[int | None]]:
    works, sizes = [RunReport() for _ in range(2)], []

    def go_on(group: ProcessGroup) -> Any:
        kept = snapshots(folder, group)
        sizes.append(kept.group_size(0))
        return by_layer(path, group, snapshots=kept, report=works[group.rank])

    return at_once(2, go_on), works, sizes


def test_an_interrupted_run_goes_on_from_its_last_layer(path, whole, tmp_path):
    interrupted(path, tmp_path, 14)
    found, works, sizes = begun_again(path, tmp_path)
    assert_same(found, whole)
    plain = RunReport()
    by_layer(path, report=plain)
    assert None not in sizes
    assert all(work.bytes_read < plain.bytes_read for work in works)


def test_a_kill_between_the_files_of_two_processes_loses_no_layer(path, whole, tmp_path):
    """One file has taken its place, the other has not yet."""
    interrupted(path, tmp_path, 5)
    early = (tmp_path / "states.1of2").read_bytes()
    interrupted(path, tmp_path, 9)
    (tmp_path / "states.1of2").rename(tmp_path / "states.1of2.next")
    (tmp_path / "states.1of2").write_bytes(early)
    found, _, sizes = begun_again(path, tmp_path)
    assert None not in sizes
    assert_same(found, whole)


def test_one_that_cannot_write_keeps_the_others_from_it(path, tmp_path, monkeypatch):
    real = snapshot.write_snapshot

    def write(path, *more):
        if "1of2" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *more)

    monkeypatch.setattr(snapshot, "write_snapshot", write)
    interrupted(path, tmp_path, 9)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_of_one_ends_the_others(path):
    def failing(group):
        if not group.is_main:
            raise PruneError("a shard has vanished")
        return by_layer(path, group)

    first, second = at_once(2, failing)
    assert "a shard has vanished" in str(second)
    assert str(first) == "process 0 stops: another one has ended"
