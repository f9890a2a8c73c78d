"""Types and sizes as people write them; casts against exact fractions, what is not finite refused."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prunecli.errors import CheckpointError, UsageError
from prunecli.tensors.dtypes import cast, config_dtype, numpy_dtype, parse_dtype
from prunecli.tensors.quantities import parse_share, parse_size
from tests.reference.casting import FORMATS, rounded


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *((text, "F16") for text in ("float16", "F16", "f16", "fp16")),
        *(("torch.bfloat16", "BF16"), ("BF16", "BF16"), (" float32 ", "F32"), ("float8_e4m3fn", "F8_E4M3")),
    ],
)
def test_names_of_types(text, dtype):
    assert parse_dtype(text) == dtype
    assert parse_dtype(config_dtype(dtype)) == dtype


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("30GiB", 30 * 2**30), ("30GB", 30 * 10**9), ("30G", 30 * 2**30), ("1.5 MiB", 3 * 2**19)),
        *(("0.5k", 512), ("1tib", 2**40), ("1048576", 2**20), ("7 B", 7)),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "3XB", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        *(("0.8", 0.8), ("80%", 0.8), ("80 %", 0.8), ("7%", 0.07), ("12.5%", 0.125)),
        *(("0", 0.0), (".5", 0.5), ("1", 1.0)),
    ],
)
def test_shares(text, share):
    assert parse_share(text) == share


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("80", r"more than everything\nWrite 0.8 or 80%"),
        ("1.5", "Write 0.015 or 1.5%"),
        *((text, "not a number") for text in ("much", "nan", "%", "")),
    ],
)
def test_what_is_no_share(text, said):
    with pytest.raises(UsageError, match=said):
        parse_share(text)


TYPES = sorted(FORMATS)


def floats(dtype: str) -> st.SearchStrategy[float]:
    """Values of the type, those near ties and near the edges of the smaller types among them."""
    width = 64 if dtype == "F64" else 32
    anywhere = st.floats(width=width, allow_nan=False, allow_infinity=False)
    near_one = st.builds(
        lambda bits, tail: 1 + bits * 2.0**-12 + tail * 2.0**-40, st.integers(0, 4095), st.integers(-1, 1)
    )
    subnormal = st.builds(lambda k: k * 2.0**-26, st.integers(-4096, 4096))
    huge = st.floats(65000, 66000, width=width)
    chosen = anywhere | near_one | subnormal | huge
    return chosen.map(lambda value: rounded(value, dtype)).filter(math.isfinite)


@given(st.data())
@pytest.mark.parametrize("wanted", TYPES)
@pytest.mark.parametrize("given_type", TYPES)
def test_rounds_once_to_the_nearest_even(given_type, wanted, data):
    values = data.draw(st.lists(floats(given_type), min_size=1, max_size=20))
    expected = [rounded(value, wanted) for value in values]
    array = np.array(values, dtype=np.float64).astype(numpy_dtype(given_type))
    assert array.astype(np.float64).tolist() == values
    if all(map(math.isfinite, expected)):
        made = cast(array, wanted, "w")
        assert made.dtype == numpy_dtype(wanted)
        assert made.astype(np.float64).tolist() == expected
        assert np.signbit(made.astype(np.float64)).tolist() == [math.copysign(1, v) < 0 for v in expected]
    else:
        with pytest.raises(CheckpointError, match="too large"):
            cast(array, wanted, "w")


@pytest.mark.parametrize(
    ("value", "wanted", "text"),
    [
        (65520.0, "F16", "dir: fc1 holds 65520, too large for float16\nChoose bfloat16"),
        (3.4e38, "BF16", "too large for bfloat16"),
        (math.nan, "F16", "dir: fc1 holds nan"),
        (math.inf, "BF16", "dir: fc1 holds inf"),
        (1e300, "BF16", "too large for bfloat16"),
        (500.0, "F8_E4M3", "too large for float8_e4m3fn"),
    ],
)
def test_what_a_type_cannot_hold(value, wanted, text):
    values = np.array([0.0, value, 1.0], dtype=np.float32 if abs(value) < 1e39 else np.float64)
    with pytest.raises(CheckpointError, match=text):
        cast(values, wanted, "dir: fc1")


@given(st.lists(st.floats(-1e38, 1e38) | st.floats(-1e-36, 1e-36), min_size=1))
@example([1 + 2**-8, 1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, -1 - 3 * 2**-8, 0.0, -0.0])
@example([2.0**-134 + 2.0**-170, 3 * 2.0**-134 - 2.0**-170, -(2.0**-134), 2.0**-150, 2.0**-126 - 2.0**-160])
def test_float64_becomes_bfloat16_in_one_rounding(numbers):
    """Halves of a step, and what lies so near that float32 cannot tell, among them; down to subnormals."""
    values = np.array(numbers)
    assert cast(values, "BF16", "w").astype(np.float64).tolist() == [rounded(v, "BF16") for v in numbers]
    assert values.tolist() == numbers
    scalar = cast(values[0].reshape(()), "BF16", "w")
    assert (scalar.shape, float(scalar)) == ((), rounded(numbers[0], "BF16"))
