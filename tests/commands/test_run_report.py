import pytest

from prunecli.commands.run import report
from tests.commands.calls import both, refused
from tests.report import results
from tests.report.pages import Page
from tests.tiny import write_json

run, done = both(report)


@pytest.fixture(autouse=True)
def _speeds(tmp_path):
    write_json(tmp_path / "latency.json", results.latency())


def test_the_page_on_stdout(tmp_path):
    assert Page(run("-o", "-").out).sections() == ["Speed and memory"]
    assert [one.name for one in tmp_path.iterdir()] == ["latency.json"]


def test_the_same_directory_makes_the_same_bytes_again(tmp_path):
    done("-o", "a.html")
    done("-o", "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_damaged_results_are_said_and_do_not_stop_it(tmp_path):
    (tmp_path / "evaluation.json").write_text('{"format": "prunecli.evaluation/1", "results": [')
    assert "Unreadable, left out: evaluation.json: cut short" in run().err
    assert "cut short" in (tmp_path / "report.html").read_text()


def test_an_existing_page_is_kept_without_force(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    refused(run(), "exists already", 1)
    assert (tmp_path / "report.html").read_text() == "mine"
    done("--force")
    assert Page((tmp_path / "report.html").read_text())
