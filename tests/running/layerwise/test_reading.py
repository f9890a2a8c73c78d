"""Blocks come in the order in which they are wanted, into buffers that are used again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import open_model
from prunecli.modules.building import make_model
from prunecli.modules.filling import Spec, block_bytes
from prunecli.running.layerwise.reading import Reader
from tests.running.layerwise.running import CPU
from tests.tiny import tiny_nllb_moe


@pytest.fixture(params=[1, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_and_order(dtype, threads, tmp_path):
    with open_model(tiny_nllb_moe(tmp_path / "model")) as checkpoint:
        skeleton = make_model(checkpoint, CPU, dtype)
        blocks = [stage.block for stage in skeleton.stages]
        blocks += [stage.mixture.block(n) for stage in skeleton.stages if stage.mixture for n in (3, 0)]
        with Reader(checkpoint, 2, skeleton.widest_bytes, CPU) as reader:
            assert len(reader._pool._threads) == threads
            for block in blocks:
                reader.want(block)
            places = set()
            for block in blocks:
                with reader.next_block() as tensors:
                    for spec, tensor in zip(block, tensors, strict=True):
                        want = torch.from_numpy(np.array(checkpoint.read(spec.names[0]))).to(spec.dtype)
                        assert torch.equal(tensor, want)
                        assert tensor.data_ptr() % 4 == 0
                    places.add(tensors[0].data_ptr())
            assert len(places) <= 2
            assert reader.bytes_read == sum(checkpoint.info(s.names[0]).nbytes for b in blocks for s in b)


def test_no_more_is_held_than_there_are_buffers(tmp_path):
    with open_model(tiny_nllb_moe(tmp_path / "model")) as checkpoint:
        skeleton = make_model(checkpoint, CPU, torch.float32)
        with Reader(checkpoint, 2, skeleton.widest_bytes, CPU) as reader:
            for stage in skeleton.stages[:3]:
                reader.want(stage.block)
            with reader.next_block() as first:
                with reader.next_block() as second:
                    assert first[0].data_ptr() != second[0].data_ptr()
                    assert not reader._begun  # the third waits
                with reader.next_block() as third:
                    assert third[0].data_ptr() == second[0].data_ptr()


def test_the_thread_ends_with_blocks_unread(tmp_path):
    with open_model(tiny_nllb_moe(tmp_path / "model")) as checkpoint:
        skeleton = make_model(checkpoint, CPU, torch.float32)
        with Reader(checkpoint, 2, skeleton.widest_bytes, CPU) as reader:
            for stage in skeleton.stages:
                reader.want(stage.block)
        assert not any(thread.is_alive() for thread in reader._pool._threads)


def test_a_failure_comes_to_who_waits(tmp_path):
    with open_model(tiny_nllb_moe(tmp_path / "model")) as checkpoint:
        block = (Spec(("no.such.tensor",), (3, 4), torch.float32),)
        with Reader(checkpoint, 2, block_bytes(block), CPU) as reader:
            reader.want(block)
            with pytest.raises(CheckpointError, match=r"no\.such\.tensor"), reader.next_block():
                pass
