"""The journal of an unfinished directory: what it names, and what it takes no word for."""

from __future__ import annotations

import json

import pytest

from prunecli.tensors.journal import FORMAT, NAME, Journal, read


@pytest.fixture
def directory(tmp_path):
    """Two complete files, a third one that is not, a folder."""
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"")
    (tmp_path / "c").write_bytes(b"1")
    (tmp_path / "folder/inner").mkdir(parents=True)
    journal = Journal(tmp_path, "key")
    journal.add("a")
    journal.add("b")
    return tmp_path


def test_it_names_what_is_complete(directory):
    assert read(directory, "key") == {"a": 5, "b": 0}
    again = Journal(directory, "key")
    assert [again.has(name) for name in "abc"] == [True, True, False]
    again.tidy()
    assert sorted(path.name for path in directory.iterdir()) == [NAME, "a", "b"]
    again.close()
    assert not (directory / NAME).exists()
    again.close()


def test_of_other_work_it_says_nothing(directory):
    assert read(directory, "another key") == {}
    journal = Journal(directory, "another key")
    journal.tidy()
    assert [path.name for path in directory.iterdir()] == [NAME]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        "{}",
        json.dumps({"format": "prunecli.unfinished/2", "key": "key", "complete": {"a": 5}}),
        json.dumps({"format": FORMAT, "key": "key"}),
        json.dumps({"format": FORMAT, "key": "key", "complete": ["a"]}),
        json.dumps({"format": FORMAT, "key": "key", "complete": {"a": "x"}}),
        json.dumps({"format": FORMAT, "key": "key", "complete": {"a": None}}),
        json.dumps({"format": FORMAT, "key": "key", "complete": {"a": 6, "missing": 0, "folder": 4096}}),
        json.dumps(
            {"format": FORMAT, "key": "key", "complete": {"../outside": 3, "/etc/passwd": 1, "link": 5}}
        ),
    ],
)
def test_damage_is_nothing(directory, content):
    (directory.parent / "outside").write_bytes(b"123")
    (directory / "link").symlink_to(directory / "a")
    (directory / NAME).write_text(content)
    assert read(directory, "key") == {}
