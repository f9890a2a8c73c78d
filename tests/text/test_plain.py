from __future__ import annotations

from pathlib import Path

import pytest

from prunecli.errors import DataError, UsageError
from prunecli.text.plain import bounded, convention, read_plain


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


def test_whole_files_keep_their_lines_but_no_mark_and_no_blank_lines_at_their_ends(tmp_path):
    paths = [
        _file(tmp_path, "a.txt", b"\xef\xbb\xbf\r\nOne.\r\n\r\n  Two.\r\n \r\n\r\n"),
        _file(tmp_path, "b.txt", "Three."),
    ]
    assert read_plain(paths, whole_files=True).texts == ("\nOne.\n\n  Two.", "Three.")


def test_whole_files_end_behind_the_first_lines(tmp_path):
    paths = [
        _file(tmp_path, "a.txt", "one\n\ntwo\n\n"),
        _file(tmp_path, "b.txt", "three\n\nfour\nfive\n"),
        _file(tmp_path, "c.jsonl", '{"text": "six\\nseven"}\n{"text": "eight"}\n'),
    ]

    def texts(count, names=()):
        return read_plain(paths, whole_files=True, names=names, max_sentences=count).texts

    assert texts(2) == ("one\n\ntwo",)
    assert texts(4) == ("one\n\ntwo", "three\n\nfour")
    assert texts(6) == ("one\n\ntwo", "three\n\nfour\nfive", "six\nseven")
    assert texts(2, ("x", "y", "y")) == ("one\n\ntwo", "three\n\nfour")
    with pytest.raises(DataError, match="x: 3 lines were asked for, there are 2"):
        texts(3, ("x", "y", "y"))


@pytest.mark.parametrize(
    ("names", "whole_files", "line"),
    [
        (
            ["a.txt"],
            True,
            "Text: 1 file as a whole document (`whole_files=False` takes each line as a text).",
        ),
        (
            ["a.txt", "b.py.gz"],
            True,
            "Text: 2 files as whole documents (`whole_files=False` takes each line as a text).",
        ),
        (
            ["a.txt", "b.jsonl"],
            False,
            "Text: 1 file, each line a text (`whole_files` takes each file as one text).",
        ),
        (["b.jsonl.gz", "hf://a/b:train[:3]"], True, None),
    ],
)
def test_what_a_text_is_is_told_of_plain_text(names, whole_files, line):
    assert convention([Path(name) for name in names], whole_files=whole_files) == line


def test_so_many_characters_hold_so_many_tokens():
    assert bounded(("a" * 20, "b" * 20, "c"), 2) == ("a" * 20, "b" * 12)


def test_the_first_texts_and_their_hash(tmp_path):
    text = read_plain([_file(tmp_path, "a.txt", "one\ntwo\n")])
    assert text.first(1).texts == ("one",)
    assert text.first(1).sha256 == read_plain([_file(tmp_path, "b.txt", "one")]).sha256 != text.sha256
    with pytest.raises(DataError, match="3 texts were asked for, there are 2"):
        text.first(3)


def test_texts_of_files_with_names(tmp_path):
    paths = [_file(tmp_path, "a", "one\ntwo\n"), _file(tmp_path, "b", "three\n\nfour\nfive\n")]
    paths.append(_file(tmp_path, "c", "six\n"))
    text = read_plain(paths, names=("x", "y", "x"))
    assert text.by_name == {"x": [0, 1, 5], "y": [2, 3, 4]}
    assert read_plain(paths, names=("x", "y", "x"), max_sentences=3) == text
    first = read_plain(paths, names=("x", "y", "x"), max_sentences=2)
    assert first.texts == ("one", "two", "three", "four")
    assert first.by_name == {"x": [0, 1], "y": [2, 3]}
    with pytest.raises(DataError, match="x: 4 texts were asked for, there are 3"):
        read_plain(paths, names=("x", "y", "x"), max_sentences=4)
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
