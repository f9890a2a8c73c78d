import itertools
import os
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.tensors import copying, stream, writer
from prunecli.tensors.copying import Gather, Move, reserve
from prunecli.tensors.dtypes import numpy_dtype
from prunecli.tensors.stream import Copy, Output
from prunecli.tensors.writer import shards_of, write_tensors
from tests.commands.calls import names
from tests.tiny import json_of, tiny_config, write_json, write_weights

CONFIG = {**tiny_config(4, 16, 32, 2, 2, 40), "model_type": "of-no-family"}


IN, OUT = Path("in"), Path("out")


def checkpoint(tensors: Mapping[str, np.ndarray]) -> Checkpoint:
    """Arbitrary tensors, of a family that is not declared."""
    IN.mkdir(exist_ok=True)
    write_json(IN / "config.json", CONFIG)
    write_weights(IN, tensors)
    return open_model(IN)


def tensors_of() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = {"a.bias": (7,), "a.weight": (7, 5), "b": (), "c.router": (6, 3), "d": (0, 4), "e": (33, 65)}
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def everything(tensors: Mapping[str, np.ndarray], dtype: str) -> list[Output]:
    return [Output(f"new.{name}", dtype, value.shape, Copy(name)) for name, value in tensors.items()]


def written(source: Checkpoint, outputs: list[Output], **options: Any) -> dict[str, np.ndarray]:
    OUT.mkdir(exist_ok=True)
    weight_map = write_tensors(source, outputs, OUT, **options)
    assert {path.name for path in OUT.glob("*.safetensors")} == set(weight_map.values())
    found = {}
    for file in sorted(set(weight_map.values())):
        found |= load_file(OUT / file)
        with safe_open(OUT / file, "numpy") as opened_file:
            assert opened_file.metadata() == {"format": "pt"}
            assert set(opened_file.keys()) == {name for name, own in weight_map.items() if own == file}
    return found


def assert_same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert found[name].tobytes() == value.tobytes(), name


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    axis=st.integers(0, 2),
    cuts=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=5),
    block=st.integers(1, 64),
    wanted=st.sampled_from(["F32", "F16"]),
    last=st.sampled_from([(), (0,), (0, 2)]),
)
@settings(max_examples=60)
def test_slices_are_taken_along_any_axis(shape, axis, cuts, block, wanted, last):
    """Along another one and, with `last`, the last one too."""
    axis %= len(shape)
    ranges = tuple(sorted(min(cut, shape[axis]) for cut in pair) for pair in cuts)
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    taken = [index for start, stop in ranges for index in range(start, stop)]
    expected = values.take(taken, axis).astype(numpy_dtype(wanted))
    parts = [(axis, tuple((a, b) for a, b in ranges))]
    if last and axis < len(shape) - 1 and last[-1] < shape[-1]:
        expected = expected.take(last, -1)
        parts.append((len(shape) - 1, tuple((one, one + 1) for one in last)))
    output = Output("out", wanted, expected.shape, Copy("a", tuple(parts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BLOCK_BYTES", 4 * block)
        patch.setattr(stream, "BLOCK_ELEMENTS", block)
        patch.setattr(writer, "JOB_BYTES", 8 * block)
        found = written(checkpoint({"a": values}), [output])
    assert_same(found, {"out": expected})


def test_mixed_types_stay_aligned():
    kinds = {"a": "U8", "b": "I64", "c": "F16", "d": "F32"}
    tensors = {name: np.arange(3, dtype=numpy_dtype(kind)) for name, kind in kinds.items()}
    outputs = [Output(name, kind, tensors[name].shape, Copy(name)) for name, kind in kinds.items()]
    assert_same(written(checkpoint(tensors), outputs), tensors)
    write_json(OUT / "config.json", CONFIG)
    made = open_model(OUT)
    for name, kind in kinds.items():
        assert made.location(name)[1] % numpy_dtype(kind).itemsize == 0


def test_one_file_is_what_the_library_would_write():
    tensors = tensors_of()
    outputs = [Output(name, "F32", value.shape, Copy(name)) for name, value in tensors.items()]
    written(checkpoint(tensors), outputs)
    assert (OUT / "model.safetensors").read_bytes() == save(tensors, metadata={"format": "pt"})


def test_shards_and_index():
    tensors = tensors_of()
    found = written(checkpoint(tensors), everything(tensors, "F32"), shard_bytes=150)
    assert_same(found, {f"new.{name}": value for name, value in tensors.items()})
    index = json_of(OUT / "model.safetensors.index.json")
    count = 7 + 35 + 1 + 18 + 33 * 65
    assert index["metadata"] == {"total_parameters": count, "total_size": 4 * count}
    files = [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 2, 3, 3, 4)]
    assert index["weight_map"] == dict(zip(found, files, strict=True))
    assert {*names(OUT)} == {*files, "model.safetensors.index.json"}


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 100))
def test_shards_keep_the_order_and_the_limit(sizes, limit):
    outputs = [Output(str(index), "U8", (size,), Copy("x")) for index, size in enumerate(sizes)]
    shards = shards_of(outputs, limit)
    assert [output for shard in shards for output in shard] == outputs
    assert all(len(shard) == 1 or sum(output.nbytes for output in shard) <= limit for shard in shards)
    assert all(
        sum(output.nbytes for output in one) + other[0].nbytes > limit
        for one, other in itertools.pairwise(shards)
    )


def test_nan_is_refused_by_a_cast_and_copied_otherwise():
    tensors = tensors_of()
    tensors["a.weight"][0, 0] = np.nan
    source = checkpoint(tensors)
    with pytest.raises(CheckpointError, match=r"a\.weight holds nan"):
        written(source, everything(tensors, "BF16"))
    found = written(source, everything(tensors, "F32"))
    assert found["new.a.weight"].tobytes() == tensors["a.weight"].tobytes()


def test_progress_counts_written_bytes():
    tensors = tensors_of()
    seen = []

    @contextmanager
    def record(description, total=None, unit="steps"):
        seen.append(-(total or 0))
        assert (description, unit) == ("writing", "bytes")
        yield seen.append

    written(checkpoint(tensors), everything(tensors, "F16"), progress=record)
    assert sum(seen) == 0
    assert seen[0] == -2 * sum(value.size for value in tensors.values())


# Moves of bytes between files: as they are and cast, in parts, from files that end early.


DATA = np.random.default_rng(0).standard_normal(3000).astype(np.float32)


@pytest.fixture
def files():
    with Path("source").open("w+b", 0) as source, Path("target").open("w+b", 0) as target:
        source.write(b"head" + DATA.tobytes())
        yield source.fileno(), target.fileno()


def move(files: tuple[int, int], nbytes: int = DATA.nbytes, at: int = 8) -> Move:
    return Move("dir: fc1", files[0], 4, nbytes, files[1], at)


def test_goes_on_after_short_reads_and_writes(files, monkeypatch):
    read, write = os.preadv, os.pwrite
    monkeypatch.setattr(copying, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read(file, [buffers[0][:77]], at))
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:55], at))
    Gather((move(files, at=4),)).carry_out()
    assert os.pread(files[1], 20000, 4) == DATA.tobytes()


def test_source_that_ends_early(files):
    with pytest.raises(CheckpointError, match="dir: fc1: its file ended early"):
        Gather((move(files, DATA.nbytes + 4),)).carry_out()


def test_more_than_the_disk_holds_is_refused_at_once(files):
    reserve(files[1], 0)
    reserve(files[1], 1)
    if os.fstat(files[1]).st_size != 1:
        pytest.skip("this file system cannot reserve")
    with pytest.raises(OSError, match=r"No space|too large|quota"):
        reserve(files[1], 1 << 62)
