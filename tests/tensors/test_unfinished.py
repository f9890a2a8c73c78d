"""The store for unfinished work: what it takes up again, and what it takes no word for."""

import pytest

from prunecli.tensors.unfinished import NAME, Journal, Store


@pytest.fixture
def directory(tmp_path):
    """Two complete files, a third one that is not, a folder."""
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"")
    (tmp_path / "c").write_bytes(b"1")
    (tmp_path / "folder/inner").mkdir(parents=True)
    journal = Journal(tmp_path, "key")
    journal.note("a", 5)
    journal.note("b", 0)
    return tmp_path


def test_records_are_found_again_by_the_same_work(tmp_path):
    path = tmp_path / "store"
    store = Store(path, "work")
    store.put("a", {"text": "un\nchat “noir”"})
    store.put("b", [1, 2.5, None])
    store.put("b", [3])
    assert Store(path, "work").records == store.records == {"a": {"text": "un\nchat “noir”"}, "b": [3]}
    assert Store(path, "other work").records == {}
    assert Store(None).records == {}
    store.remove()
    store.remove()
    assert not path.exists()


def test_the_file_does_not_grow_with_every_replaced_record(tmp_path):
    store = Store(tmp_path / "store")
    for number in range(100):
        store.put("sums", [number] * 100)
    assert (tmp_path / "store").stat().st_size < 10_000
    assert Store(tmp_path / "store").records == {"sums": [99] * 100}
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("cut", [1, 13, 33])
def test_a_line_that_was_cut_short_is_left_out_and_the_next_is_whole(tmp_path, cut):
    path = tmp_path / "store"
    Store(path).put("a", "first")
    Store(path).put("b", "second")
    path.write_bytes(path.read_bytes()[:-cut])
    again = Store(path)
    assert again.records == {"a": "first"}
    again.put("c", "third")
    assert Store(path).records == {"a": "first", "c": "third"}


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "[" * 100_000, '{"record": ["", "a"]}', '{"record": 3}', "\0"]
)
def test_damage_is_nothing(directory, text):
    (directory / NAME).write_text(text)
    assert Journal(directory, "key").records == {}


def test_a_journal_names_what_is_complete(directory):
    journal = Journal(directory, "key")
    assert journal.nbytes == 5
    assert [journal.has(name) for name in "abc"] == [True, True, False]
    journal.tidy()
    assert sorted(path.name for path in directory.iterdir()) == [NAME, "a", "b"]
    journal.remove()
    assert not (directory / NAME).exists()


def test_a_journal_takes_no_word_for_what_lies_elsewhere(directory):
    (directory.parent / "outside").write_bytes(b"123")
    (directory / "link").symlink_to(directory / "a")
    store = Store(directory / NAME, "key")
    for name, size in {
        "../outside": 3,
        "/etc/passwd": 1,
        "link": 5,
        "a": 6,
        "missing": 0,
        "folder": 4096,
    }.items():
        store.put(name, [size, 0, ""])
    assert set(Journal(directory, "key").records) == {"b"}
