"""The generators make the bundled texts, byte for byte."""

import gzip

import pytest

from prunecli.demo import DATA, LM_DATA, LM_TEXTS
from tests.commands.calls import names
from tools.demo import corpus, programs
from tools.demo.languages import BY_CODE

TRAIN = 300
"""Sentences of train that are made again: all 24,000 take seconds."""


@pytest.fixture(scope="module")
def written(shared_path):
    directory = shared_path / "data"
    corpus.main(directory, TRAIN)
    return directory


def test_the_held_out_text_is_made_again(written):
    assert names(written) == names(DATA)
    for split in ("val", "test"):
        for code in BY_CODE:
            assert (written / f"{split}.{code}").read_bytes() == (DATA / f"{split}.{code}").read_bytes()


@pytest.mark.parametrize("code", BY_CODE)
def test_the_training_text_begins_as_it_is_made(code, written):
    made, bundled = (
        gzip.decompress((folder / f"train.{code}.gz").read_bytes()) for folder in (written, DATA)
    )
    assert made.count(b"\n") == TRAIN
    assert bundled.startswith(made)


def test_the_text_of_the_language_model_is_made_again(tmp_path):
    programs.main(tmp_path)
    made = sorted(f"{split}.{name}" for split in programs.HELD_OUT for name in LM_TEXTS)
    assert names(tmp_path) == names(LM_DATA) == made
    for name in made:
        assert (tmp_path / name).read_bytes() == (LM_DATA / name).read_bytes()
    assert (LM_DATA / "val.prose").read_bytes() == (DATA / f"val.{programs.PROSE}").read_bytes()
