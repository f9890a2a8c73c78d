from contextvars import copy_context
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli import __version__
from prunecli.errors import OutputError, PruneError, StatisticsError
from prunecli.model.checkpoint import open_model
from prunecli.processes import COMMAND
from prunecli.results.gates import GateStatistics
from prunecli.tensors.documents import write_json
from prunecli.tensors.json_files import read_json
from tests.tiny import json_of, tiny_nllb_moe

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(payload=st.dictionaries(st.text(), VALUES, max_size=5))
def test_what_is_written_is_read(tmp_path_factory, payload):
    path = tmp_path_factory.mktemp("json") / "a.json"
    write_json(path, payload)
    assert read_json(path) == json_of(path) == payload


@pytest.mark.parametrize("value", [float("nan"), {1, 2}], ids=str)
def test_what_has_no_form_in_json_is_not_written(tmp_path, value):
    with pytest.raises(PruneError, match=r"a\.json: not written"):
        write_json(tmp_path / "a.json", {"a": [value]})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_kept_without_force(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(OutputError, match="exists already"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    write_json(path, {"a": 2}, force=True)
    assert read_json(path) == {"a": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_failure_leaves_nothing_and_keeps_the_old(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    monkeypatch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"a": 2}, force=True)
    monkeypatch.undo()
    assert read_json(path) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_the_header(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest", "--password", "1234"])
    checkpoint = open_model(tiny_nllb_moe(tmp_path / "tiny"))
    assert GateStatistics.header([checkpoint], 3) == {
        "format": "prunecli.gates/1",
        "prunecli": __version__,
        "command": [],
        "models": [{"path": "tiny", "fingerprint": checkpoint.fingerprint, "model_type": "nllb-moe"}],
        "seed": 3,
    }


def test_the_command_is_that_of_the_command_line_without_its_secrets(tmp_path):
    token = "hf_" + "a1B2" * 8
    words = [
        "prunecli",
        "evaluate",
        f"https://me:{token}@example.invalid/org/name",
        f"--x={token}",
        "-o",
        "a@b",
    ]
    command = copy_context().run(lambda: (COMMAND.set(words), GateStatistics.header([], None))[1])
    assert command["command"] == [*words[:2], "https://***@example.invalid/org/name", "--x=***", "-o", "a@b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "an empty file"),
        (" \n", "an empty file"),
        ('{"format": "prunecli.gates/1", "a": [1, 2', "cut short at line 1"),
        ('{"format": "prunecli.gat', "cut short"),
        ("{]}", "not JSON"),
        ('{"format": "prunecli.gates/1", "a": NaN}', "holds NaN"),
        ('{"format": "prunecli.gates/1", "a": -Infinity}', "holds -Infinity"),
        ("{}", "has no format"),
        ("[1, 2]", "has no format"),
        ('{"format": "prunecli.heads/1"}', 'has the format "prunecli.heads/1", this prunecli reads'),
        ('{"format": "prunecli.gates/2"}', "this prunecli reads"),
        ("[" * 100_000, "a.json"),
    ],
)
def test_damaged_documents(tmp_path, text, says):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(StatisticsError, match=says) as caught:
        read_json(path, "prunecli.gates/1")
    assert str(path) in str(caught.value)
