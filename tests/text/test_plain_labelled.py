from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import DataError
from prunecli.text.plain import LabelledText, label_ids, read_labelled

MNLI = {0: "ENTAILMENT", 1: "NEUTRAL", 2: "CONTRADICTION"}


def _file(folder, data):
    path = folder / "text.tsv"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_the_first_examples_and_the_hash(tmp_path):
    text = read_labelled(_file(tmp_path, "0\ta\tb\n1\tc\td\n"))
    assert text.first(None) == text
    first = text.first(1)
    assert (first.labels, first.texts, first.seconds, first.lines) == (("0",), ("a",), ("b",), (1,))
    assert first.sha256 != text.sha256
    with pytest.raises(DataError, match="3 examples were asked for, it holds 2"):
        text.first(3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "empty"),
        ("0\ta\nno tab here\n", "line 2: 1 fields, where 2 or 3 are expected"),
        ("0\ta\n\n\tb\n", "line 3: no label"),
        ("0\t \n", "line 1: no text"),
        ("0\ta\t\n", "line 1: no text"),
        ("0\ta\tb\tc\n", "line 1: 4 fields"),
        ("0\ta\tb\n1\tc\n", "line 2: 2 fields, where line 1 has 3"),
        ("0\ta\n1\tb\tc\n", "line 2: 3 fields, where line 1 has 2"),
        ('{"text": "a"}\n', "line 1: no label"),
        ('{"label": true, "text": "a"}\n', "line 1: no label"),
        ('{"label": null, "text": "a"}\n', "line 1: no label"),
        ('{"label": 1}\n', "line 1: no text"),
        ('{"label": 1, "text": 2}\n', "line 1: no text"),
        ('{"label": 1, "text": "a"}\n[1]\n', "line 2: not a JSON object"),
        ('{"label": 1, "text": "a"}\n{"label": 1\n', "line 2: not JSON"),
        (b"0\ta\n1\t\xe9\n", "line 2: not UTF-8"),
    ],
)
def test_unusable_lines_are_named(tmp_path, data, message):
    path = _file(tmp_path, data)
    with pytest.raises(DataError, match=message) as caught:
        read_labelled(path)
    assert str(path) in caught.value.message


def _labels(*labels):
    return LabelledText(Path("t.tsv"), labels, ("x",) * len(labels), None, tuple(range(1, len(labels) + 1)))


def test_names_in_any_case_and_numbers():
    assert label_ids(_labels("NEUTRAL", "contradiction", "0", "Entailment"), MNLI) == [1, 2, 0, 0]


@pytest.mark.parametrize("label", ["3", "maybe"])
def test_unknown_labels_are_named_with_the_known_ones(label):
    with pytest.raises(DataError, match="line 2: the model knows no label") as caught:
        label_ids(_labels("0", label), MNLI)
    assert repr(label) in caught.value.message
    assert "NEUTRAL" in caught.value.remedy


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.text("ab é\u2028\"'{,", min_size=1).filter(str.strip)), min_size=1
    )
)
def test_both_forms_hold_the_same(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("labelled")
    tabs = read_labelled(_file(folder, "".join(f"{label}\t{text}\n" for label, text in rows)))
    lines = read_labelled(
        _file(folder, "".join(json.dumps({"label": label, "text": text}) + "\n" for label, text in rows))
    )
    assert tabs == lines
    assert tabs.texts == tuple(text.strip() for _, text in rows)
