"""Data sets of the hub as text, by a stand-in for the package that streams them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from prunecli.errors import DataError, PruneError, UsageError
from prunecli.text.files import (
    HubData,
    TextFile,
    is_hub_data,
    names_of,
    parse_hub_data,
    parse_text_file,
    read_hub_data,
)
from prunecli.text.plain import Corpus, read_corpora

CHAT = [{"role": "user", "content": "hi", "tool": None}, {"role": "assistant", "content": None, "tool": "x"}]
ROWS = [{"text": f"row {number}", "code": f"x = {number}", "turns": CHAT} for number in range(100)]


class Stand:
    """A data set that notes requests and the number of rows read."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.read, self.asked = rows, 0, ()

    def load_dataset(self, name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[Any]:
        assert streaming
        self.asked = (name, config, split)
        for row in self.rows:
            self.read += 1
            yield row


@pytest.fixture
def stand(monkeypatch):
    found = Stand(ROWS)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=found.load_dataset))
    return found


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("hf://a/b", HubData("a/b", None, "train", None, None)),
        ("hf://a/b.c-d:test", HubData("a/b.c-d", None, "test", None, None)),
        ("hf://a/b/en:train[:30]", HubData("a/b", "en", "train", 30, None)),
        ("hf://a/b:val:the code", HubData("a/b", None, "val", None, "the code")),
        ("hf://a/b:val[:5]:code", HubData("a/b", None, "val", 5, "code")),
    ],
)
def test_a_name_says_data_set_config_split_rows_and_column(written, meant):
    assert is_hub_data(written)
    assert is_hub_data(Path(written))
    assert parse_hub_data(written) == parse_hub_data(Path(written)) == meant
    assert parse_hub_data(str(meant)) == meant


@pytest.mark.parametrize("written", ["hf://a", "hf://a/b/c/d", "hf://a/b:train[5:]"])
def test_another_form_is_refused_where_it_is_typed(written):
    with pytest.raises(UsageError, match="no data set of the hub is named so"):
        parse_text_file(f"code={written}")


def test_no_more_is_read_than_tokens_can_need(stand):
    documents = read_hub_data("hf://a/b:train", max_tokens=2)
    assert documents == tuple(f"row {number}" for number in range(7))  # 35 of 2 x 16 characters
    assert stand.read == 7


def test_a_column_of_chats_is_messages_without_what_tables_fill_up(stand):
    one, other = read_hub_data("hf://a/b:train[:2]:turns")
    answer = {"role": "assistant", "content": None, "tool": "x"}
    assert one == other == ({"role": "user", "content": "hi"}, answer)


def test_names_are_the_data_sets_and_files_stand_beside_it(stand):
    Path("more.txt").write_text("a line\n")
    values = ("hf://org/name.v2:train[:1]", "code=hf://org/other:train[:2]:code", "code=./more.txt")
    first, second = read_corpora([parse_text_file(value) for value in values])
    assert (first.name, first.documents) == ("name.v2", ("row 0",))
    assert (second.name, second.documents) == ("code", ("x = 0", "x = 1", "a line"))
    assert isinstance(first, Corpus)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("hf://a/b:train[:2]:prose", r"hf://a/b:train\[:2\]:prose, row 1: has no column 'prose'"),
        ("hf://a/b:train[:0]", "no rows"),
    ],
)
def test_what_is_not_there_is_an_error(stand, written, message):
    with pytest.raises(DataError, match=message):
        read_hub_data(written)


def test_rows_of_neither_kind_name_the_columns(stand):
    stand.rows = [{"question": "a", "answer": "b"}]
    with pytest.raises(DataError, match=r"neither text nor a chat\n.*question, answer"):
        read_hub_data("hf://a/b:train[:2]")


def test_what_fails_there_is_an_error_of_a_line(stand, monkeypatch):
    monkeypatch.setattr(
        sys.modules["datasets"], "load_dataset", Mock(side_effect=ValueError("no such\nsplit"))
    )
    with pytest.raises(DataError, match=r"cannot be read \(no such split\)"):
        read_hub_data("hf://a/b:train[:2]")


def test_without_the_package_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PruneError, match="which is not installed"):
        read_hub_data("hf://a/b:train[:2]")


@pytest.mark.parametrize(
    ("value", "path", "name"),
    [
        ("a.txt", "a.txt", None),
        ("code=a.txt", "a.txt", "code"),
        ("code=x/a=b.txt", "x/a=b.txt", "code"),
        ("Code 2 =a.txt", "a.txt", "Code 2"),
        ("./a=b.txt", "a=b.txt", None),
        ("runs/ratio=0.5/text.txt", "runs/ratio=0.5/text.txt", None),
    ],
)
def test_a_value_is_a_file_or_a_name_and_a_file(value, path, name):
    assert parse_text_file(value) == TextFile(Path(path), name)


def test_a_file_that_is_there_has_an_equals_sign_of_its_own():
    Path("ratio=half.txt").write_text("a\n")

    assert parse_text_file("ratio=half.txt") == TextFile(Path("ratio=half.txt"))


@pytest.mark.parametrize(
    ("value", "says"),
    [("=a.txt", "no name"), (" =a.txt", "no name"), ("code=", "no file"), ("a,b=c", "a comma")],
)
def test_refuses(value, says):
    with pytest.raises(UsageError, match=says):
        parse_text_file(value)


def test_files_without_names_go_by_their_own():
    files = [parse_text_file(value) for value in ("x/wiki.jsonl.gz", "code=a.py", "code=b.py", ".hidden")]

    assert names_of(files) == ("wiki", "code", "code", "hidden")
