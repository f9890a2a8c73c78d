"""The generator makes the bundled text; word order is as documented."""

import gzip

import pytest

from prunecli.demo import DATA, LANGUAGES
from tools.demo.corpus import main

TRAIN = 300
"""Sentences of train that are made again: all 24,000 take seconds."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("written") / "data"
    main(directory, TRAIN)
    return directory


def test_the_held_out_text_is_made_again_byte_for_byte(written):
    assert {file.name for file in written.iterdir()} == {file.name for file in DATA.iterdir()}
    for split in ("val", "test"):
        for code in LANGUAGES:
            assert (written / f"{split}.{code}").read_bytes() == (DATA / f"{split}.{code}").read_bytes()


@pytest.mark.parametrize("code", LANGUAGES)
def test_the_training_text_begins_as_it_is_made(code, written):
    made, bundled = (
        gzip.decompress((folder / f"train.{code}.gz").read_bytes()) for folder in (written, DATA)
    )
    assert made.count(b"\n") == TRAIN
    assert bundled.startswith(made)
