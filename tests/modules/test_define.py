"""The DeFINE unit against its slow restatement; what it stores and counts; the output side."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prunecli.model.define import UNIT_KINDS, UnitShape
from prunecli.modules.define import DefineEmbedding
from tests.reference import define as reference

EXPANDING = [kind for kind in UNIT_KINDS if kind != "projective"]


@st.composite
def shapes(draw: st.DrawFn) -> UnitShape:
    kind = draw(st.sampled_from(EXPANDING))
    depth, most = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    multiple = 1
    for groups in reference.groups(kind, most, depth):
        multiple = next(value for value in range(multiple, 1000, multiple) if value % groups == 0)
    map_dim = multiple * draw(st.integers(1, 4))
    expand_dim = map_dim + multiple * draw(st.integers(0, 20))
    model_dim = map_dim + draw(st.integers(0, 9))
    reduction = draw(st.booleans())
    if not reduction:
        model_dim = expand_dim
    if kind == "hgt-residual":
        expand_dim *= 2
    vocabulary, shared = draw(st.integers(1, 50)), draw(st.booleans())
    return UnitShape(vocabulary, map_dim, model_dim, expand_dim, depth, most, kind, shared, reduction)


def random_unit(shape: UnitShape, **options: object) -> DefineEmbedding:
    torch.manual_seed(0)
    unit = DefineEmbedding(shape, **options).double()
    with torch.no_grad():
        for value in unit.parameters():
            value.copy_(torch.randn(value.shape) * 0.7)
    return unit


def slow_rows(unit: DefineEmbedding) -> np.ndarray:
    layers = []
    for number, groups in enumerate(unit.shape.groups):
        weight, bias = (value.detach().numpy() for value in unit.group_layer(number))
        blocks = [*weight] * (groups if unit.shape.shared_blocks else 1)
        assert len(blocks) == groups
        layers.append((blocks, bias))
    last = (
        (None, None)
        if unit.reduce is None
        else [value.detach().numpy() for value in unit.reduce.parameters()]
    )
    return reference.unit(unit.shape.kind, unit.map.weight.detach().numpy(), layers, *last)


@settings(max_examples=25)
@given(shapes())
def test_any_shape_agrees_with_the_restatement_and_the_formula(shape):
    unit = random_unit(shape)
    rows = unit(torch.arange(shape.vocabulary)).detach()
    np.testing.assert_allclose(rows, slow_rows(unit), rtol=1e-8, atol=1e-8)
    assert sum(value.numel() for value in unit.parameters()) == shape.parameters
    assert shape.unit_parameters == shape.parameters - unit.map.weight.numel()
    assert {name: tuple(value.shape) for name, value in unit.state_dict().items()} == shape.tensors()
