"""The DeFINE unit against its slow restatement; what it stores and counts; the output side."""

import numpy as np
import torch
from hypothesis import given, settings

from prunecli.model.define import UnitShape
from prunecli.modules.define import DefineEmbedding
from tests.model.test_define import shapes
from tests.reference import define as reference


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
    assert {name: tuple(value.shape) for name, value in unit.state_dict().items()} == shape.tensors()
