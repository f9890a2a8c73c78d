"""The DeFINE unit against its slow restatement; what it stores and counts; the output side."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from prunecli.model.define import UnitKind, UnitShape
from prunecli.modules.define import DefineEmbedding, GroupLinear
from tests.model.test_define import shapes
from tests.reference import define as reference


def random_unit(shape: UnitShape, **options: object) -> DefineEmbedding:
    torch.manual_seed(0)
    unit = DefineEmbedding(shape, **options).double()
    with torch.no_grad():
        for value in unit.parameters():
            value.copy_(torch.randn(value.shape) * 0.7)
    return unit


def slow_row(unit: DefineEmbedding, token: int) -> list[float]:
    layers = []
    for number, groups in enumerate(unit.shape.groups):
        weight, bias = unit.group_layer(number)
        blocks = weight.tolist() * (groups if unit.shape.shared_blocks else 1)
        assert len(blocks) == groups
        layers.append((blocks, bias.tolist()))
    token_vector = unit.map.weight[token].tolist()
    last = (None, None) if unit.reduce is None else (unit.reduce.weight.tolist(), unit.reduce.bias.tolist())
    return reference.unit(unit.shape.kind, token_vector, layers, *last)


def shape_of(kind: UnitKind) -> UnitShape:
    return UnitShape(11, 8, 9, 24, 3, 4, kind)


@settings(max_examples=25)
@given(shapes())
def test_any_shape_agrees_with_the_restatement_and_the_formula(shape):
    unit = random_unit(shape)
    token = shape.vocabulary - 1
    np.testing.assert_allclose(
        unit(torch.tensor([token])).detach()[0], slow_row(unit, token), rtol=1e-8, atol=1e-8
    )
    assert sum(value.numel() for value in unit.parameters()) == shape.parameters
    assert {name: tuple(value.shape) for name, value in unit.state_dict().items()} == shape.tensors()


def test_rows_come_in_chunks_unscaled():
    unit = random_unit(shape_of("define"), padding_idx=1, scale=3.0)
    chunks = list(unit.expanded(chunk_rows=4))
    assert [len(chunk) for chunk in chunks] == [4, 4, 3]
    table = torch.cat(chunks)
    torch.testing.assert_close(table * 3.0, unit(torch.arange(11)))
    assert not table.requires_grad


def test_the_padding_row_is_zero_and_learns_nothing():
    unit = random_unit(shape_of("define"), padding_idx=1)
    rows = unit(torch.tensor([0, 1]))
    assert rows[0].any()
    assert not rows[1].any()
    rows.sum().backward()
    assert unit.map.weight.grad is not None
    assert unit.map.weight.grad[0].any()
    assert not unit.map.weight.grad[1].any()


def test_inputs_of_another_width_are_refused():
    unit = random_unit(shape_of("define"))
    with pytest.raises(RuntimeError):
        unit.transform(torch.zeros(2, 7, dtype=torch.float64))
    with pytest.raises(RuntimeError):
        GroupLinear(unit.shape.layers[0])(torch.zeros(2, 7))
