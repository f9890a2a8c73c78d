from __future__ import annotations

import pytest

from prunecli.evaluation.decoding import Translation
from prunecli.evaluation.partial import PartialTranslations
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
    assert again.get("a", 3) is None
    assert again.dtypes == {"what is run": "bfloat16"}


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
