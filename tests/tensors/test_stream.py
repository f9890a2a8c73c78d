"""Computed tensors against numpy on whole arrays, in blocks of any size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prunecli.errors import CheckpointError
from prunecli.tensors import stream
from prunecli.tensors.dtypes import numpy_dtype
from prunecli.tensors.stream import (
    TILE,
    Concat,
    Copy,
    Expression,
    Generated,
    Output,
    Sum,
    check_expressions,
    noise,
    shape_of,
    values,
    zeros,
)
from tests.reference.casting import rounded
from tests.tensors.test_writer import checkpoint, written

KINDS = ("F32", "F16", "BF16")


def tensors_of(kind: str = "F32") -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = {"a": (13, 7), "b": (13, 7), "c": (13, 7), "bias": (7,), "scalar": ()}
    dtype = numpy_dtype(kind)
    return {name: generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def expected(expression: Expression, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The whole tensor in float64, without rounding; of expressions without noise."""
    if isinstance(expression, Sum):
        return sum(expression.weight * expected(part, tensors) for part in expression.parts)
    if isinstance(expression, Concat):
        return np.concatenate([expected(part, tensors) for part in expression.parts], axis=expression.axis)
    if isinstance(expression, Generated):
        return np.zeros(expression.shape)
    whole = tensors[expression.source].astype(np.float64)
    for axis, ranges in expression.taken:
        whole = whole.take([index for start, stop in ranges for index in range(start, stop)], axis)
    return whole


def made(expression: Expression, kind: str = "F32", wanted: str = "F32", block: int = 1 << 18) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "BLOCK_ELEMENTS", block)
        source = checkpoint(tensors_of(kind))
        return written(source, [Output("out", wanted, shape_of(source, expression), expression)])["out"]


ABC = (Copy("a"), Copy("b"), Copy("c"))


@pytest.mark.parametrize("wanted", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_is_rounded_once(kind, wanted):
    expression = Sum(ABC, 1 / 3)
    found = made(expression, kind, wanted, block=20)
    whole = expected(expression, tensors_of(kind))
    assert found.dtype == numpy_dtype(wanted)
    wide = [rounded(value, wanted) for value in whole.reshape(-1).tolist()]
    np.testing.assert_array_equal(found.astype(np.float64).reshape(-1), wide)


def leaves() -> st.SearchStrategy[Expression]:
    """Selections `[4, 7]` of the tensors."""
    name, rows = st.sampled_from("abc"), st.lists(st.integers(0, 12), min_size=4, max_size=4)
    return st.one_of(
        st.builds(lambda source, start: Copy(source, ((0, ((start, start + 4),)),)), name, st.integers(0, 9)),
        st.builds(
            lambda source, taken: Copy(source, ((0, tuple((row, row + 1) for row in taken)),)), name, rows
        ),
        st.builds(
            lambda source, row: Copy(source, ((0, ((row, row + 1), (0, 2), (12, 13))),)),
            name,
            st.integers(0, 12),
        ),
        st.just(zeros((4, 7))),
    )


def trees(parts: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    several = st.lists(parts, min_size=1, max_size=3).map(tuple)
    return st.builds(Sum, several, st.floats(-2, 2))


@given(
    tree=st.recursive(leaves(), trees, max_leaves=5),
    other=leaves(),
    axis=st.integers(0, 1),
    block=st.integers(1, 40),
)
@settings(max_examples=60)
def test_any_tree_of_expressions(tree, other, axis, block):
    expression = Concat(axis, (tree, other, tree))
    found = made(expression, block=block)
    np.testing.assert_allclose(found, expected(expression, tensors_of()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wanted", ["F32", "BF16"])
def test_scattered_slices_are_put_together_in_blocks(wanted, monkeypatch):
    """The values are those of slices that are moved one by one."""
    expression = Copy("a", ((1, ((0, 1), (2, 3), (4, 5), (6, 7))),))
    moved = made(expression, wanted=wanted)
    monkeypatch.setattr(stream, "MOST_RANGES", 3)
    assert made(expression, wanted=wanted, block=10).tobytes() == moved.tobytes()
    taken = tensors_of()["a"].take([0, 2, 4, 6], 1).astype(numpy_dtype(wanted))
    np.testing.assert_array_equal(moved.astype(np.float32), taken.astype(np.float32))


def test_noise_depends_on_its_seed_alone():
    drawn = noise((300, 500), 0.02, seed=7)
    assert drawn.shape[0] * drawn.shape[1] > 2 * TILE
    whole = made(drawn)
    assert np.array_equal(made(drawn, block=1_300), whole)
    assert np.array_equal(made(Concat(0, (zeros((3, 500)), drawn)), block=7_777)[3:], whole)
    assert not np.array_equal(made(noise((300, 500), 0.02, seed=8)), whole)
    assert abs(whole.mean()) < 5 * 0.02 / np.sqrt(whole.size)
    assert abs(whole.std() / 0.02 - 1) < 0.02


def test_values_come_in_order(monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_ELEMENTS", 16)
    found = list(values(checkpoint(tensors_of("F16")), Sum(ABC, -0.5)))
    assert [len(block) for block in found] == [2] * 6 + [1]
    np.testing.assert_array_equal(np.concatenate(found), expected(Sum(ABC, -0.5), tensors_of("F16")))


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        (Sum((Copy("a"), Copy("bias")), 1), "too many values"),
        (Concat(0, (Copy("a"), Copy("bias"))), "too many values"),
        (Sum((Copy("a", ((0, ((13, 14),)),)),), 1), "lacks some of the ranges"),
        (Copy("bias"), "its source gives"),
        (Copy("a", ((1, ((3, 6),)),)), "its source gives"),
        (Sum((Copy("bias"),), 1), "its source gives"),
        (Copy("a", ((0, ((-1, 0),)),)), "lacks some of the ranges"),
        (Copy("scalar", ((0, ((0, 1),)),)), "lacks some of the ranges"),
        (Copy("a", ((2, ((0, 2),)),)), "lacks some of the ranges"),
    ],
)
def test_expressions_that_cannot_be(expression, fault):
    source = checkpoint(tensors_of())
    with pytest.raises(ValueError, match=fault):
        check_expressions(source, [Output("out", "F32", (13, 7), expression)])


@pytest.mark.parametrize(
    ("value", "wanted", "message"),
    [
        (np.nan, "F32", "holds nan"),
        (np.inf, "F32", "holds inf"),
        (1e6, "F16", r"holds 1e\+06, too large for float16"),
    ],
)
def test_values_that_no_output_can_hold(value, wanted, message):
    tensors = {"a": np.full((2, 2), value, np.float32), "b": np.ones((2, 2), np.float32)}
    source = checkpoint(tensors)
    output = Output("out", wanted, (2, 2), Sum((Copy("a"), Copy("b")), 1.0))
    with pytest.raises(CheckpointError, match=f"in: out {message}"):
        written(source, [output])
