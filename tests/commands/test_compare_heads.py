import json
from functools import partial

import pytest

from prunecli import demo, results
from prunecli.commands.compare import compare_heads
from prunecli.model.checkpoint import open_model
from tests.commands import calls
from tests.commands.calls import call
from tests.commands.heads import scored
from tests.pictures import pixels
from tests.tiny import json_of

run, done = partial(call, compare_heads), partial(calls.done, compare_heads)


@pytest.fixture
def files(tmp_path):
    with open_model(demo.CHECKPOINT) as checkpoint:
        for seed, name in enumerate(("a.json", "b.json")):
            (tmp_path / name).write_text(json.dumps(scored(checkpoint, seed)))
    return tmp_path


def test_table_picture_and_file(files):
    result = done("a.json", "b.json", "--plot", "points.png", "--table", "table.csv")
    for text in (
        "a.json and b.json",
        "all",
        "48",
        "cross",
        "16",
        "Written to head-comparison.json, points.png",
    ):
        assert text in result.out + result.err, text
    pixels(files / "points.png")
    comparison = results.read(files / "head-comparison.json")
    assert len(comparison.frame("heads")) == 48
    assert (files / "table.csv").read_text().startswith("table,of,heads,pearson,pearson_p")
    assert json.loads(run("a.json", "b.json", "--json", "--force").out)["first"]["file"] == "a.json"
    assert run("a.json", "b.json").status == 1  # the result exists


def test_scores_of_two_models_are_said_to_be(files):
    other = json_of(files / "b.json")
    other["models"][0]["fingerprint"] = "sha256:11"
    other["ids"] = {name: ids[:-1] for name, ids in other["ids"].items()}
    other["values"] = {name: row[:-1] for name, row in other["values"].items()}
    (files / "b.json").write_text(json.dumps(other))
    shown = run("a.json", "b.json").out
    assert "of two models" in shown
    assert "left out: 12" in shown


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("a.json", "./a.json"), 2, "given twice"),
        (("a.json", "c.json"), 1, "no such file"),
        (("a.json", "b.json", "--plot", "points.jpg"), 2, "unknown kind of file"),
    ],
)
def test_refused(files, arguments, status, message):
    result = run(*arguments)
    assert result.status == status
    assert message in result.err
    assert not (files / "head-comparison.json").exists()
