from __future__ import annotations

import pytest

from prunecli.evaluation.decoding import Translation
from prunecli.evaluation.partial import PartialTranslations, key_of
from prunecli.tensors.documents import partial_path

MADE = [Translation("un\nchat “noir”", True), Translation("", False)]
RUN = ("what is run", "bfloat16")


@pytest.fixture
def path(tmp_path):
    return partial_path(tmp_path / "evaluation.json")


def test_what_was_kept_is_found_again(path):
    kept = PartialTranslations(path)
    kept.add("a", MADE, *RUN)
    kept.add("b", MADE[:1], *RUN)
    again = PartialTranslations(path)
    assert len(again) == 2
    assert again.get("a", 2) == MADE
    assert again.get("b", 1) == MADE[:1]
    assert again.dtypes == {"what is run": "bfloat16"}


def test_other_keys_and_other_counts_are_not_found(path):
    PartialTranslations(path).add("a", MADE, *RUN)
    again = PartialTranslations(path)
    assert again.get("b", 2) is None
    assert again.get("a", 3) is None


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_line_that_was_cut_short_is_left_out_and_the_next_is_whole(path, cut):
    PartialTranslations(path).add("a", MADE, *RUN)
    PartialTranslations(path).add("b", MADE, *RUN)
    path.write_bytes(path.read_bytes()[:-cut])
    again = PartialTranslations(path)
    assert (again.get("a", 2), again.get("b", 2)) == (MADE, None)
    again.add("c", MADE, *RUN)
    assert PartialTranslations(path).get("c", 2) == MADE


@pytest.mark.parametrize(
    "text", ["", "null", "[]", '{"key": "a"}', '{"key": "a", "translations": 3}', "\x00"]
)
def test_a_damaged_file_holds_nothing(path, text):
    path.write_text(text)
    assert len(PartialTranslations(path)) == 0


def test_remove_also_where_there_is_none(path):
    kept = PartialTranslations(path)
    kept.remove()
    kept.add("a", MADE, *RUN)
    kept.remove()
    assert not path.exists()


def test_keys_differ_by_every_field_and_not_by_their_order():
    assert key_of({"a": 1, "b": [2]}) == key_of({"b": [2], "a": 1})
    assert key_of({"a": 1, "b": [2]}) != key_of({"a": 1, "b": [3]})
