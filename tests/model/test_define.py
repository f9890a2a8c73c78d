import pytest

from prunecli.errors import UsageError
from prunecli.model.define import UnitShape


def test_the_translation_unit_of_the_paper():
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
def test_impossible_dimensions_are_refused(arguments, message, remedy):
    with pytest.raises(UsageError, match=message) as caught:
        UnitShape(*arguments)
    assert remedy in (caught.value.remedy or "")
