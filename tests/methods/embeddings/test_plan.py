"""Dimensions that are left out: whatever the model's width, they make a unit."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prunecli.errors import UsageError
from prunecli.methods.embeddings.options import EmbeddingOptions
from prunecli.methods.embeddings.plan import EmbeddingPlan, chosen_shape, plan_embeddings
from prunecli.model.changes import EmbeddingChange, InputChange, OutputChange
from prunecli.model.checkpoint import open_model
from prunecli.model.define import UNIT_KINDS, UnitShape
from prunecli.model.embedding import TokenTables


def tables(model_dim: int) -> TokenTables:
    return TokenTables("shared", (), "lm_head", 1000, model_dim, None, EmbeddingChange())


@given(
    model_dim=st.integers(16, 4096),
    kind=st.sampled_from([kind for kind in UNIT_KINDS if kind != "projective"]),
    depth=st.integers(1, 7),
    groups=st.integers(1, 12),
)
def test_what_is_left_out_divides(model_dim, kind, depth, groups):
    options = EmbeddingOptions(kind=kind, depth=depth, max_groups=groups)
    try:
        shape = chosen_shape(tables(model_dim), options, has_unit=True)
    except UsageError:  # no multiple of the groups is below the model's width
        with pytest.raises(UsageError):
            UnitShape(1000, model_dim - model_dim % groups, model_dim, 4 * model_dim, depth, groups, kind)
        assume(False)
    assert 0 < shape.map_dim < model_dim
    assert shape.expand_dim >= shape.map_dim
    assert abs(shape.expand_dim - 2 * model_dim) <= 4 * shape.group_multiple


@pytest.mark.parametrize(
    "options",
    [
        EmbeddingOptions(expand_dim=64),
        EmbeddingOptions(depth=2),
        EmbeddingOptions(max_groups=2),
        EmbeddingOptions(kind="linear"),
        EmbeddingOptions(map_dim=512),
        EmbeddingOptions(shared_blocks=True),
        EmbeddingOptions(reduction=False),
        EmbeddingOptions(map_dim=0),
    ],
)
def test_an_output_has_a_map_alone(options):
    with pytest.raises(UsageError):
        chosen_shape(tables(512), options, has_unit=False)


@pytest.fixture
def source(models):
    return models["bart"]


def decided(source: Path, options: EmbeddingOptions) -> EmbeddingPlan:
    return plan_embeddings(open_model(source), options)


UNIT = InputChange("define", 4, 64, 3, 4)
CACHED = replace(UNIT, cached=True)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        (EmbeddingOptions(), EmbeddingChange(UNIT, OutputChange(4, tied=True))),
        (EmbeddingOptions(side="input"), EmbeddingChange(UNIT, OutputChange())),
        (EmbeddingOptions(side="output"), EmbeddingChange(None, OutputChange(4))),
        (EmbeddingOptions(cache=True), EmbeddingChange(CACHED, OutputChange(4))),
        (
            EmbeddingOptions(side="input", kind="projective"),
            EmbeddingChange(InputChange("projective", 4), OutputChange()),
        ),
    ],
)
def test_sides_of_a_shared_table(source, options, change):
    assert decided(source, options).change == change


def test_each_table_by_itself(models):
    source = models["llama"]
    assert decided(source, EmbeddingOptions()).change == EmbeddingChange(UNIT)
    both = decided(source, EmbeddingOptions(side="both"))
    assert both.change == EmbeddingChange(UNIT, OutputChange(4))
    assert not both.is_tied


def test_the_history_says_what_was_asked(source):
    step = decided(source, EmbeddingOptions(seed=3, dtype="float16", epochs=2)).step
    assert step["command"] == "factorize-embeddings"
    unit = {"kind": "define", "map_dim": 4, "expand_dim": 64, "depth": 3, "max_groups": 4}
    assert step["arguments"] == {"side": "both", **unit, "epochs": 2, "dtype": "float16", "seed": 3}
    assert step["source"]["path"] == "bart"
