"""Which text a training run takes."""

from __future__ import annotations

import pytest

from prunecli import demo
from prunecli.errors import DataError
from prunecli.text.choice import TextChoice
from prunecli.text.parallel import read_parallel
from prunecli.training.data import read_training_data

DEMO = TextChoice(split="train", pairs="qba_Latn-qbo_Latn", max_sentences=3, demo=demo.DATA)


@pytest.mark.parametrize(("asked", "split"), [(None, "val"), ("val", "val"), ("test", "test")])
def test_the_demo_validates_on_the_split_asked_for(asked, split):
    languages = ("qba_Latn", "qbo_Latn")
    data = read_training_data("translation", DEMO, TextChoice(split=asked, max_sentences=2))
    assert data.train == read_parallel(demo.DATA, "train", languages).first(3)
    assert data.valid == read_parallel(demo.DATA, split, languages).first(2)


@pytest.mark.parametrize("data", [None, demo.DATA])
def test_a_split_that_the_demo_lacks_is_refused(data):
    with pytest.raises(DataError, match="no split 'nosuch'"):
        read_training_data("translation", DEMO.model_copy(update=dict(data=data)), TextChoice(split="nosuch"))
