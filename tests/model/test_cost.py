"""The width of hidden states, by the declared families' tables."""

from __future__ import annotations

import pytest

from prunecli.architectures import FAMILIES
from prunecli.model.cost import model_dim
from prunecli.model.declared import Sizes


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_width_of_hidden_states_is_that_of_the_embeddings(model_type):
    family = FAMILIES[model_type]
    table = next(spec for spec in family.tensors if spec.name == f"{family.embedding.input}.weight")  # type: ignore[union-attr]
    assert Sizes(family, {}).count(model_dim(family)) == Sizes(family, {}).count(table.shape[1])
