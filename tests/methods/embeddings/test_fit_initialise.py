"""The initial weights make the unit the best projective embedding of the same n."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from prunecli.methods.embeddings.fit import initialise
from prunecli.model.define import UNIT_KINDS, UnitShape
from prunecli.modules.define import DefineEmbedding
from tests.methods.embeddings.tables import bent_table, start_of, truncated_svd
from tests.model.test_define import shapes


def start(shape: UnitShape, seed: int = 0) -> tuple[DefineEmbedding, np.ndarray, int]:
    array = bent_table(shape.vocabulary, shape.model_dim)
    found = start_of(array, shape.map_dim, shape.groups[0] if shape.groups else 1)
    unit = DefineEmbedding(shape)
    mapped = found.mapped(array)
    with torch.no_grad():
        unit.map.weight.copy_(torch.from_numpy(mapped))
    return unit, array, initialise(unit, found, mapped.min(axis=0), seed)


@settings(max_examples=40)
@given(shapes())
def test_starts_as_the_truncated_svd_whatever_the_shape(shape):
    unit, array, carried = start(shape)
    if shape.groups[-1] == 1:
        assert carried == shape.map_dim or (shape.kind == "group-linear-shuffle" and shape.shared_blocks)
    elif not shape.reduction:
        assert carried == 0
    elif shape.kind != "hgt-no-mixing" and not (shape.kind == "group-linear-shuffle" and shape.shared_blocks):
        assert carried == shape.map_dim
    if carried == shape.map_dim:
        expected = truncated_svd(array, shape.map_dim)
        np.testing.assert_allclose(unit.rows(0, shape.vocabulary), expected, atol=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in UNIT_KINDS if kind != "projective"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_last_layer_can_be_the_truncated_svd(kind, shared):
    expand_dim = 48 if kind == "hgt-residual" else 24
    shape = UnitShape(200, 8, 24, expand_dim, 3, 4, kind, shared, reduction=False)
    unit, array, carried = start(shape)
    assert unit.reduce is None
    expected = truncated_svd(array, 8)
    rows = unit.rows(0, 200).numpy()
    if shape.groups[-1] == 1:
        assert carried == 8
        np.testing.assert_allclose(rows, expected, atol=2e-4)
    elif shared:
        np.testing.assert_allclose(rows, np.broadcast_to(array.mean(axis=0), rows.shape), atol=2e-4)
    else:  # each group has a part of e
        assert carried == 0
        missing = [((array - other) ** 2).sum() for other in (expected, rows, array.mean(axis=0))]
        assert missing[0] < missing[1] < missing[2]


def test_pairs_need_no_offset_where_there_is_room():
    unit, array, _ = start(UnitShape(200, 8, 24, 40, 3, 4))
    with torch.no_grad():
        far = unit.map.weight.detach() * 100
        expected = (array - array.mean(axis=0)) * 0 + unit.reduce.bias.numpy()
        changed = unit.transform(far).numpy() - expected
    near = unit.rows(0, 200).numpy() - expected
    np.testing.assert_allclose(changed, near * 100, rtol=1e-3, atol=2e-2)


def test_the_seed_decides_the_random_units_only():
    shape = UnitShape(200, 8, 24, 40, 3, 4)
    first, again, other = (start(shape, seed)[0] for seed in (1, 1, 2))
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.group_layer(2)[0], other.group_layer(2)[0])
    torch.testing.assert_close(first.rows(0, 200), other.rows(0, 200), atol=1e-4, rtol=1e-4)
