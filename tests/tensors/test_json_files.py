"""JSON that is read strictly, or so that damage counts as absence."""

from __future__ import annotations

from pathlib import Path

import pytest

from prunecli.errors import CheckpointError
from prunecli.tensors.json_files import lenient, parsed, read_json, read_object

DAMAGED = {
    "no JSON": b'{"a"',
    "no UTF-8": b'{"a": "\xff"}',
    "nested without end": b"[" * 100_000,
    "a number of thousands of digits": b'{"a": ' + b"9" * 5000 + b"}",
    "half a surrogate pair": b'{"a": "\\uD800"}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_whatever_is_wrong_with_a_text_is_one_error(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"."):
        parsed(content)
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.json: "):
        read_object(tmp_path / "a.json")


@pytest.mark.parametrize(
    "content", [*DAMAGED.values(), b"", b"[]", b"7", b"{}", b'{"a": 5}', b'{"a": NaN}', b'{"a": "x"}']
)
def test_what_is_read_leniently_is_none_where_it_is_damaged(content: bytes, tmp_path: Path) -> None:
    count = lenient(lambda path: 1 // len(read_json(path)["a"]["b"]))
    path = tmp_path / "a.json"
    assert count(path) is None
    path.write_bytes(content)
    assert count(path) is None
    path.write_bytes(b'{"a": {"b": []}}')
    assert count(path) is None
    path.write_bytes(b'{"a": {"b": [0]}}')
    assert count(path) == 1
    assert count(tmp_path) is None


def test_no_key_twice() -> None:
    assert parsed('{"a": {"b": 1}, "b": ":"}', unique=True) == {"a": {"b": 1}, "b": ":"}
    for text in ('{"a": 1, "a": 1}', '{"a": {"b": 1, "b": 1}}', '{"a": [{"b": {}, "b": 1}]}'):
        with pytest.raises(ValueError, match="occurs twice"):
            parsed(text, unique=True)
        assert parsed(text)
