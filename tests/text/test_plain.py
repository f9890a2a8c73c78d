from __future__ import annotations

from pathlib import Path

import pytest

from prunecli.errors import DataError, UsageError
from prunecli.text.plain import read_plain


def _file(folder, name, data):
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_each_line_is_a_text_and_blank_lines_are_none(tmp_path):
    first = _file(tmp_path, "a.txt", b"\xef\xbb\xbfThe hat.\r\n\r\n  \t\r\n No.\r\n")
    second = _file(tmp_path, "b.txt", "une\u2028ligne\nlast")
    text = read_plain([first, str(second)])
    assert text.texts == ("The hat.", " No.", "une\u2028ligne", "last")
    assert text.files == (first, second)
    assert len(text) == 4


def test_whole_files_keep_their_lines(tmp_path):
    paths = [_file(tmp_path, "a.txt", "One.\r\n\r\nTwo.\r\n"), _file(tmp_path, "b.txt", "Three.")]
    assert read_plain(paths, whole_files=True).texts == ("One.\n\nTwo.", "Three.")


def test_the_first_texts_and_their_hash(tmp_path):
    text = read_plain([_file(tmp_path, "a.txt", "one\ntwo\n")])
    assert text.first(None) == text
    assert text.first(1).texts == ("one",)
    assert text.first(1).sha256 == read_plain([_file(tmp_path, "b.txt", "one")]).sha256 != text.sha256
    with pytest.raises(DataError, match="3 texts were asked for, there are 2"):
        text.first(3)


def test_texts_of_files_with_names(tmp_path):
    paths = [_file(tmp_path, "a", "one\ntwo\n"), _file(tmp_path, "b", "three\n\nfour\nfive\n")]
    paths.append(_file(tmp_path, "c", "six\n"))
    text = read_plain(paths, names=("x", "y", "x"))
    assert text.by_name == {"x": [0, 1, 5], "y": [2, 3, 4]}
    assert text.first(None) == text
    assert text.first(3) == text
    first = text.first(2)
    assert first.texts == ("one", "two", "three", "four")
    assert first.by_name == {"x": [0, 1], "y": [2, 3]}
    with pytest.raises(DataError, match="x: 4 texts were asked for, there are 3"):
        text.first(4)
    assert read_plain(paths).by_name == {}
    assert read_plain(paths[:2], whole_files=True, names=("x", "y")).names == ("x", "y")


@pytest.mark.parametrize(
    ("data", "message"),
    [("", "empty"), ("\n \n", "empty"), (b"fine\nno\xff\n", "line 2: not UTF-8"), (None, "no such file")],
)
def test_unusable_files(tmp_path, data, message):
    good = _file(tmp_path, "good.txt", "text")
    bad = tmp_path / "bad.txt" if data is None else _file(tmp_path, "bad.txt", data)
    with pytest.raises(DataError, match=message) as caught:
        read_plain([good, bad])
    assert str(bad) in caught.value.message


def test_no_file_at_all():
    with pytest.raises(UsageError, match="no file"):
        read_plain(list[Path]())


def test_the_texts_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "one\\ntwo", "id": 3}\n\n{"text": "three"}\n{"text": " "}\n', encoding="utf-8")
    assert read_plain([path]).texts == ("one\ntwo", "three")
    path.write_text('{"messages": [{"role": "user", "content": "one"}]}\n', encoding="utf-8")
    with pytest.raises(DataError, match="holds chats; texts are needed here"):
        read_plain([path])
    path.write_text("one\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1: not JSON"):
        read_plain([path])
