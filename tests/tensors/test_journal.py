"""The journal of an unfinished directory: what it names, and what it takes no word for."""

from __future__ import annotations

import json

import pytest

from prunecli.tensors.journal import FORMAT, NAME, Begun, Content, Journal, read


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
    assert read(directory, "key") == Content({"a": 5, "b": 0})
    assert read(directory, "key").nbytes == 5
    again = Journal(directory, "key")
    assert [again.has(name) for name in "abc"] == [True, True, False]
    again.tidy()
    assert sorted(path.name for path in directory.iterdir()) == [NAME, "a", "b"]
    again.close()
    assert not (directory / NAME).exists()
    again.close()


def test_it_says_how_far_a_file_is(directory):
    (directory / "d").write_bytes(bytes(100))
    Journal(directory, "key").note(Begun("d", "layout", 3, 70))
    journal = Journal(directory, "key")
    assert journal.content.nbytes == 75
    assert (journal.done("d", "layout"), journal.done("d", "other"), journal.done("c", "layout")) == (3, 0, 0)
    journal.tidy()
    assert (directory / "d").exists()
    (directory / "d").write_bytes(bytes(69))
    assert read(directory, "key") == Content({"a": 5, "b": 0})
    journal.add("d")
    assert read(directory, "key") == Content({"a": 5, "b": 0, "d": 69})


def test_of_other_work_it_says_nothing(directory):
    assert read(directory, "another key") == Content()
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
        json.dumps({"format": "prunecli.unfinished/2", "key": "key", "begun": None, "complete": {"a": 5}}),
        json.dumps({"format": FORMAT, "key": "key"}),
        json.dumps({"format": FORMAT, "key": "key", "begun": ["a"], "complete": {"a": 5}}),
        json.dumps({"format": FORMAT, "key": "key", "begun": None, "complete": ["a"]}),
        json.dumps({"format": FORMAT, "key": "key", "begun": None, "complete": {"a": "x"}}),
        json.dumps({"format": FORMAT, "key": "key", "begun": None, "complete": {"a": None}}),
        json.dumps(
            {
                "format": FORMAT,
                "key": "key",
                "begun": None,
                "complete": {"a": 6, "missing": 0, "folder": 4096},
            }
        ),
        json.dumps(
            {
                "format": FORMAT,
                "key": "key",
                "begun": None,
                "complete": {"../outside": 3, "/etc/passwd": 1, "link": 5},
            }
        ),
    ],
)
def test_damage_is_nothing(directory, content):
    (directory.parent / "outside").write_bytes(b"123")
    (directory / "link").symlink_to(directory / "a")
    (directory / NAME).write_text(content)
    assert read(directory, "key") == Content()
