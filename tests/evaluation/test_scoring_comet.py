"""COMET's program is played by a script that scores a sentence by the share of the reference's words that it has."""

from __future__ import annotations

import stat
import sys

import numpy as np
import pytest

from prunecli.errors import PruneError
from prunecli.evaluation.scoring import bootstrap_of_means, comet_scores

SCRIPT = f"""#!{sys.executable}
import argparse, json
parser = argparse.ArgumentParser()
for name in ("-s", "-r", "--model", "--gpus", "--to_json"):
    parser.add_argument(name)
parser.add_argument("--quiet", action="store_true")
parser.add_argument("-t", nargs="+")
given = parser.parse_args()
if given.model == "nobody/nothing":
    raise SystemExit("KeyError: no such model")
read = lambda path: open(path, encoding="utf-8").read().split("\\n")[:-1]
sources, references = read(given.s), read(given.r)
rows = {{}}
for path in given.t:
    lines = read(path)
    assert len(lines) == len(sources) == len(references)
    rows[path] = [
        {{"mt": line, "COMET": len(set(line.split()) & set(right.split())) / len(set(right.split()))}}
        for line, right in zip(lines, references)
    ]
json.dump(rows, open(given.to_json, "w"))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "comet-score").write_text(SCRIPT)
    (folder / "comet-score").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.usefixtures("program")
def test_each_sentence_of_each_system():
    systems = {"full": ["a b", "c\nd"], "pruned": ["a x", ""]}
    scores = comet_scores("some/model", ["s", "t"], ["a b", "c d"], systems)
    assert {label: values.tolist() for label, values in scores.items()} == {
        "full": [100, 100],
        "pruned": [50, 0],
    }


@pytest.mark.usefixtures("program")
def test_a_program_that_fails_says_why():
    with pytest.raises(PruneError, match="comet-score --model nobody/nothing: KeyError: no such model"):
        comet_scores("nobody/nothing", ["s"], ["a"], {"full": ["a"]})


def test_without_the_program_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PruneError, match="comet-score is not installed") as error:
        comet_scores("some/model", ["s"], ["a"], {"full": ["a"]})
    assert "pipx install unbabel-comet" in error.value.remedy


def test_bootstrap_of_means():
    random = np.random.default_rng(0)
    base = random.normal(50, 10, 200)
    _, same, near, worse = bootstrap_of_means([base, base, base + random.normal(0, 5, 200), base - 5], 500)
    assert same.p_value == 1.0
    assert near.p_value is not None
    assert near.p_value > 0.01
    assert worse.p_value == 1 / 501  # it is five less in every sentence, so in every resample
    assert worse.mean == pytest.approx(base.mean() - 5, abs=0.3)
    assert worse.ci95 == pytest.approx(1.96 * base.std() / 200**0.5, rel=0.15)
