import numpy as np
import pytest

from prunecli.model.checkpoint import open_model
from tests.tiny import config_of, random_tensors, tiny_nllb_moe, write_weights

FORMS = (
    {"dtype": "F16"},
    {"pickled": True, "shards": 2, "dtype": "F16"},
    {"config": {"dropout": 0.3}},
)


@pytest.fixture
def tiny():
    return tiny_nllb_moe("tiny")


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms_of_one_model_agree(tiny, form):
    other = tiny_nllb_moe("other", **form)
    assert open_model(tiny).fingerprint == open_model(other).fingerprint


@pytest.mark.parametrize("form", [{"seed": 1}, {"experts": 7}], ids=str)
def test_other_models_differ(tiny, form):
    other = tiny_nllb_moe("other", **form)
    assert open_model(tiny).fingerprint != open_model(other).fingerprint


def test_a_value_in_the_middle_of_any_tensor_counts(tiny):
    """Overflow and NaN too."""
    marks = {open_model(tiny).fingerprint}
    tensors = random_tensors(config_of(tiny))
    for value in (np.nan, 1e30, -1e30, 0.0):
        tensors["model.decoder.layer_norm.bias"][8] = value
        write_weights(tiny, tensors)
        marks.add(open_model(tiny).fingerprint)
    assert len(marks) == 5
