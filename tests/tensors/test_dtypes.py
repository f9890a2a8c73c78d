"""Types and sizes as people write them."""

from __future__ import annotations

import re

import pytest

from prunecli.errors import CheckpointError, UsageError
from prunecli.tensors.dtypes import (
    config_dtype,
    is_float,
    itemsize,
    numpy_dtype,
    parse_computed,
    parse_dtype,
)
from prunecli.tensors.quantities import parse_share, parse_size

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "U8": 1, "BOOL": 1}


@pytest.mark.parametrize(("dtype", "size"), SIZES.items())
def test_sizes_of_types(dtype: str, size: int) -> None:
    assert itemsize(dtype) == numpy_dtype(dtype).itemsize == size


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("float16", "F16"),
        ("F16", "F16"),
        ("f16", "F16"),
        ("fp16", "F16"),
        ("torch.bfloat16", "BF16"),
        ("BF16", "BF16"),
        (" float32 ", "F32"),
        ("float8_e4m3fn", "F8_E4M3"),
    ],
)
def test_names_of_types(text: str, dtype: str) -> None:
    assert parse_dtype(text) == dtype
    assert parse_dtype(config_dtype(dtype)) == dtype


def test_which_types_are_floating() -> None:
    assert [is_float(dtype) for dtype in ("F32", "BF16", "F8_E5M2", "I32", "BOOL")] == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("text", ["", "float17", "int4", "F4"])
def test_unknown_types(text: str) -> None:
    with pytest.raises(UsageError, match="unknown type"):
        parse_dtype(text)


def test_a_type_under_one_byte_has_no_numpy_form() -> None:
    with pytest.raises(CheckpointError, match="F4"):
        numpy_dtype("F4")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("30GiB", 30 * 2**30),
        ("30GB", 30 * 10**9),
        ("30G", 30 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("0.5k", 512),
        ("1tib", 2**40),
        ("1048576", 2**20),
        ("7 B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "1.2.3G", "3XB", "1e3", "nan", "inf", "0.1"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("0.8", 0.8),
        ("80%", 0.8),
        ("80 %", 0.8),
        ("7%", 0.07),
        ("12.5%", 0.125),
        ("0", 0.0),
        (".5", 0.5),
        ("1", 1.0),
    ],
)
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("80", r"more than everything\nWrite 0.8 or 80%"),
        ("1.5", "Write 0.015 or 1.5%"),
        ("much", "not a number"),
        ("nan", "not a number"),
        ("%", "not a number"),
        ("", "not a number"),
    ],
)
def test_what_is_no_share(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_share(text)
    assert re.search(f"--ratio {text}.*{said}", str(refused.value), re.DOTALL)


@pytest.mark.parametrize("text", ["fp8", "float64", "auto"])
def test_types_that_nothing_is_computed_in(text: str) -> None:
    with pytest.raises(UsageError, match=f"--dtype-out {text}: no such type"):
        parse_computed(text, "--dtype-out")
