from pathlib import Path

import pytest

from prunecli.commands.run import report
from tests.commands.calls import both, names, refused
from tests.report import results
from tests.report.pages import Page
from tests.tiny import write_json

run, done = both(report)


@pytest.fixture(autouse=True)
def _speeds():
    write_json("latency.json", results.latency())


def test_the_page_on_stdout():
    assert Page(run("-o -").out).sections() == ["Speed and memory"]
    assert names() == ["latency.json"]


def test_the_same_directory_makes_the_same_bytes_again():
    done("-o a.html")
    done("-o b.html")
    assert Path("a.html").read_bytes() == Path("b.html").read_bytes()


def test_damaged_results_are_said_and_do_not_stop_it():
    Path("evaluation.json").write_text('{"format": "prunecli.evaluation/1", "results": [')
    assert "Unreadable, left out: evaluation.json: cut short" in run().err
    assert "cut short" in Path("report.html").read_text()


def test_an_existing_page_is_kept_without_force():
    Path("report.html").write_text("mine")
    refused(run(), "exists already", 1)
    assert Path("report.html").read_text() == "mine"
    done("--force")
    assert Page(Path("report.html").read_text())
