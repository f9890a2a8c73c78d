"""Blocks come in the order in which they are wanted, into buffers that are used again."""

import pytest
import torch

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import open_model
from prunecli.modules.building import make_model
from prunecli.modules.filling import Spec, block_bytes
from prunecli.running.layerwise.reading import Reader
from tests.running.layerwise.running import CPU
from tests.tiny import tiny_nllb_moe


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
