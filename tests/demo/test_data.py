import pytest

from prunecli.demo import DATA, LANGUAGES
from prunecli.errors import DataError
from prunecli.text.parallel import read_parallel

COUNTS = {"train": 24_000, "val": 200, "test": 200}


@pytest.fixture(scope="module")
def text():
    return {split: read_parallel(DATA, split) for split in COUNTS}


def test_every_split_is_there_in_every_language_and_nothing_else():
    held_out = {f"{split}.{code}" for split in ("val", "test") for code in LANGUAGES}
    assert {file.name for file in DATA.iterdir()} == held_out | {f"train.{code}.gz" for code in LANGUAGES}


def test_languages_in_their_order(text):
    assert all(tuple(split.sentences) == LANGUAGES for split in text.values())


@pytest.mark.parametrize("code", LANGUAGES)
def test_no_sentence_occurs_twice(code, text):
    assert {split: len(read.sentences[code]) for split, read in text.items()} == COUNTS
    assert len({line for read in text.values() for line in read.sentences[code]}) == sum(COUNTS.values())


def test_another_split_is_refused_with_those_that_there_are():
    with pytest.raises(DataError, match="no split 'dev'") as caught:
        read_parallel(DATA, "dev")
    assert "test, train, val" in str(caught.value)
