"""What a run of `collect-gates` that ends early leaves and says."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from prunecli.commands.collect_gates import collect_gates
from prunecli.errors import PruneError
from prunecli.methods.experts import collect
from prunecli.methods.experts.collect import PartialRun, State
from tests.commands.calls import call


def end_early(run: PartialRun) -> None:
    with run.kept():
        run.save(State(3, {}))
        raise PruneError("another process has ended")


def test_a_signal_while_it_ends_waits_until_all_is_kept_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, said = collect.write_json, list[str]()

    def disturbed(*arguments: object, **options: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        write(*arguments, **options)

    monkeypatch.setattr(collect, "write_json", disturbed)
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        with pytest.raises(SystemExit):
            end_early(PartialRun(tmp_path / "g", {}, say=said.append))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said == [f"Kept in {tmp_path / '.g.partial'}: the same command goes on from it."]
    assert collect.read_state(tmp_path / ".g.partial", {}).batches == 3


@pytest.mark.parametrize("batches", [-1, 4, None])
def test_a_state_whose_numbers_were_damaged_is_left_aside(tmp_path: Path, batches: object) -> None:
    path = tmp_path / "state"
    collect.write_state(path, {"a": 1}, State(3, {}))
    assert collect.read_state(path, {"a": 1}) == State(3, {})
    path.write_text(path.read_text().replace('"batches": 3', f'"batches": {json.dumps(batches)}'))
    assert collect.read_state(path, {"a": 1}) == State()


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*_: object, **__: object) -> None:
        raise AssertionError("the model is run, and its result would be lost")

    monkeypatch.setattr(collect, "score", begun)
    refused = call(collect_gates, "-o", str(tmp_path / "no" / "gates.json"))
    assert refused.status == 1
    assert f"{tmp_path / 'no'}: no such directory" in refused.err
