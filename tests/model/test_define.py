"""Dimensions of DeFINE units: the paper's rules over many shapes, published widths by hand, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import UsageError
from prunecli.model.define import SKIPPING, UNIT_KINDS, UnitKind, UnitShape
from tests.reference import define as reference

EXPANDING = [kind for kind in UNIT_KINDS if kind != "projective"]


@st.composite
def shapes(draw: st.DrawFn) -> UnitShape:
    kind: UnitKind = draw(st.sampled_from(EXPANDING))
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


@given(shapes())
def test_widths_rise_evenly_and_every_group_gets_the_same(shape: UnitShape) -> None:
    assert list(shape.groups) == reference.groups(shape.kind, shape.max_groups, shape.depth)
    widths = (shape.map_dim, *shape.widths)
    assert list(widths) == sorted(widths)
    if shape.kind == "hgt-residual":
        assert set(shape.widths) == {shape.expand_dim / 2}
    else:
        assert widths[-1] == shape.expand_dim
        for number, width in enumerate(widths):
            even = shape.map_dim + number * (shape.expand_dim - shape.map_dim) / shape.depth
            assert abs(width - even) <= shape.group_multiple / 2
    for number, layer in enumerate(shape.layers):
        again = shape.map_dim if number and shape.kind in SKIPPING else 0
        assert layer.inputs == widths[number] + again
        assert layer.outputs == widths[number + 1]
        assert widths[number] % layer.groups == again % layer.groups == layer.outputs % layer.groups == 0


@given(shapes())
def test_parameters_are_those_of_the_tensors(shape: UnitShape) -> None:
    sizes = {}
    for name, dimensions in shape.tensors().items():
        sizes[name] = 1
        for size in dimensions:
            sizes[name] *= size
    assert shape.parameters == sum(sizes.values())
    assert shape.unit_parameters == shape.parameters - sizes["map.weight"]


def test_the_translation_unit_of_the_paper() -> None:
    # 4.2: n 128, k 1024, m 512, N 3. Widths 128 + 896 l / 3 = 426.67, 725.33, 1024, to multiples of 4.
    shape = UnitShape(37_000, 128, 512, 1024, 3, 4)
    assert shape.groups == (4, 2, 1)
    assert shape.widths == (428, 724, 1024)
    # 128 x 428 / 4 + (428 + 128) x 724 / 2 + (724 + 128) x 1024 / 1
    assert [layer.weights for layer in shape.layers] == [13_696, 201_272, 872_448]
    # The weights, the biases of the layers, 1024 x 512 + 512.
    assert shape.unit_parameters == 1_087_416 + (428 + 724 + 1024) + 524_288 + 512
    assert shape.table_parameters == 37_000 * 512
    assert shape.output_parameters == 128 * 512


def test_the_ablations_differ_in_inputs_and_groups() -> None:
    found = {kind: UnitShape(10, 8, 12, 16, 2, 2, kind) for kind in EXPANDING}
    # Widths 8 -> 12 -> 16.
    assert [layer.weights for layer in found["define"].layers] == [8 * 12 // 2, 20 * 16]
    assert [layer.weights for layer in found["hgt-no-mixing"].layers] == [8 * 12 // 2, 20 * 16]
    assert [layer.weights for layer in found["hgt-no-skip"].layers] == [8 * 12 // 2, 12 * 16]
    assert [layer.weights for layer in found["group-linear"].layers] == [8 * 12 // 2, 12 * 16 // 2]
    assert found["group-linear-shuffle"].layers == found["group-linear"].layers
    assert [layer.weights for layer in found["linear"].layers] == [8 * 12, 12 * 16]
    # Widths 8 -> 8 -> 8.
    assert [layer.weights for layer in found["hgt-residual"].layers] == [8 * 8 // 2, 8 * 8]


def test_one_block_for_all_groups_and_no_reduction() -> None:
    # Widths 8 -> 12 -> 16, groups 2 and 1: A.1's W has n / g x m / g values.
    shape = UnitShape(10, 8, 16, 16, 2, 2, shared_blocks=True, reduction=False)
    assert [layer.weights for layer in shape.layers] == [4 * 6, 20 * 16]
    assert shape.tensors() == {
        "map.weight": (10, 8),
        "layers.0.weight": (1, 4, 6),
        "layers.0.bias": (12,),
        "layers.1.weight": (1, 20, 16),
        "layers.1.bias": (16,),
    }
    assert shape.unit_parameters == 4 * 6 + 12 + 20 * 16 + 16


def test_what_the_paper_counts_and_what_follows_from_its_text() -> None:
    # Table 6a, "linear": N 7, n 384, k 1024, m 384. With the 13.90 M of input and output and the 24.73 M of the model
    # of Table 1a, and a 384 x 384 projection of what is mapped, 42.86 M.
    others = 13.90e6 + 24.73e6
    linear = reference.unit_weights(384, 1024, 384, [1] * 7, skips=False)
    assert others + linear + 384**2 == pytest.approx(42.86e6, abs=5e3)
    shape = UnitShape(1, 384, 384, 1024, 7, 1, "linear")
    assert shape.unit_parameters - sum(shape.widths) - 384 == pytest.approx(linear, rel=1e-3)
    # Table 2: 1.92 M for n = 64, 128, 256 and 384 alike; no g_max gives that, with shared blocks or without.
    for shared in (False, True):
        for most in (1, 2, 4, 8, 16, 32, 64):
            groups = reference.groups("define", most, 3)
            counts = [
                reference.unit_weights(n, 4096, 384, groups, skips=True, shared=shared) for n in (64, 384)
            ]
            assert not all(abs(count - 1.92e6) < 0.02e6 for count in counts)


def test_projective_is_a_table_and_a_linear_layer() -> None:
    shape = UnitShape(100, 7, 11, kind="projective")
    assert shape.layers == ()
    assert shape.tensors() == {"map.weight": (100, 7), "reduce.weight": (11, 7), "reduce.bias": (11,)}
    assert shape.parameters == 700 + 77 + 11


def test_few_units_share_widths() -> None:
    # 8 + 4 l / 4 = 9, 10, 11, 12 to multiples of 4, halves upwards.
    assert UnitShape(10, 8, 20, 12, 4, 4).widths == (8, 12, 12, 12)
    # An expansion that only its own single group divides: inner widths stay below it.
    assert UnitShape(10, 8, 20, 11, 3, 4).widths == (8, 8, 11)


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        ((10, 9, 8, 16), "9 is above the model's width 8", "Give `map_dim=8` or less"),
        (
            (10, 8, 20, 16, 3, 4, "define", False, False),
            "dimension is 20, not 16",
            "Give `expand_dim=20`, or leave it out",
        ),
        (
            (10, 8, 20, 20, 3, 4, "hgt-residual", False, False),
            "dimension is 40, not 20",
            "Give `expand_dim=40`, or leave it out",
        ),
        ((10, 8, 20, 0, 0, 0, "projective", True), "no layers to share", "Leave out `shared_blocks`"),
        ((10, 8, 20, 0, 0, 0, "projective", False, False), "reduction alone", "choose another `kind`"),
        ((10, 8, 20, 4), "expansion dimension 4 is below the map dimension 8", "Give `expand_dim=8` or more"),
        ((10, 8, 20, 16, 0), "depth is 0", "Give `depth=1` or more"),
        ((10, 8, 20, 16, 3, 0), "groups is 0", "Give `max_groups=1` or more"),
        ((10, 10, 20, 16, 3, 4), "map dimension 10 cannot be split.*multiple of 4", "Give `map_dim` 8 or 12"),
        ((10, 3, 20, 16, 3, 4), "map dimension 3 cannot be split", "Give `map_dim` 4,"),
        (
            (10, 10, 20, 17, 1, 5),
            "expansion dimension 17 cannot be split.*multiple of 5",
            "Give `expand_dim` 15 or 20",
        ),
        (
            (10, 6, 20, 17, 2, 3, "group-linear"),
            "expansion dimension 17 cannot be split",
            "Give `expand_dim` 15 or 18",
        ),
        (
            (10, 8, 20, 12, 3, 4, "hgt-residual"),
            "12 is below twice the map dimension 8",
            "Give `expand_dim=16` or more",
        ),
        (
            (10, 8, 20, 20, 3, 4, "hgt-residual"),
            "dimension 20 cannot be split.*of 8",
            "Give `expand_dim` 16 or 24",
        ),
        ((0, 8, 20, 16), "vocabulary is 0", "has rows"),
        ((10, 0, 20, 16), "map dimension is 0", "above 0"),
        ((10, 8, 20, 16, 3, 4, "deep"), "'deep' is no kind", "define, hgt-no-mixing"),
    ],
)
def test_impossible_dimensions_are_refused(arguments: tuple, message: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        UnitShape(*arguments)
    assert remedy in (caught.value.remedy or "")
