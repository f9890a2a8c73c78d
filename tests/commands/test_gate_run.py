"""What a run of `collect-gates` that ends early leaves and says."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from prunecli.commands.collect_gates import collect_gates
from prunecli.commands.gate_run import GateRun
from prunecli.errors import PruneError
from prunecli.methods.experts import resume
from prunecli.methods.experts.score import CollectOptions, State
from prunecli.processes import ALONE
from prunecli.progress import silent
from prunecli.text.parallel import ParallelText
from tests.commands.calls import call


def end_early(run: GateRun) -> None:
    with run._kept() as (_, save):
        save(State(3, {}))
        raise PruneError("another process has ended")


def test_a_signal_while_it_ends_waits_until_all_is_kept_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = resume.write_json

    def disturbed(*arguments: object, **options: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        write(*arguments, **options)

    monkeypatch.setattr(resume, "write_json", disturbed)
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    run = GateRun(None, ParallelText("val", {}), [], CollectOptions(), {}, tmp_path / "g", silent, ALONE)
    try:
        with pytest.raises(SystemExit):
            end_early(run)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "Kept in" in capsys.readouterr().err
    assert resume.read_state(tmp_path / ".g.partial", {}).batches == 3


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*_: object) -> None:
        raise AssertionError("the model is run, and its result would be lost")

    monkeypatch.setattr(GateRun, "in_memory", begun)
    refused = call(collect_gates, "-o", str(tmp_path / "no" / "gates.json"))
    assert refused.status == 1
    assert f"{tmp_path / 'no'}: no such directory" in refused.err
