"""What is read, when, and what is left behind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.modules.building import make_model
from prunecli.modules.filling import Spec, block_bytes
from prunecli.modules.loading import sparse_ffns
from prunecli.modules.sparse_ffn import EXPERT_PARTS
from prunecli.modules.stages import EmptyModel
from prunecli.running.layerwise.reading import Reader
from prunecli.running.runner import ignored
from tests.opening import load
from tests.running.layerwise.running import CPU, count_reads, passes, skeleton_of, started
from tests.tiny import tiny_nllb_moe


class Run:
    """A checkpoint's skeleton and what was read of it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.skeleton = checkpoint, skeleton_of(checkpoint)
        self.reads = count_reads(checkpoint)

    def run(self, advance: Any = ignored) -> Any:
        with started(self.skeleton, self.checkpoint, advance=advance) as (layers, _):
            layers.forward(passes(self.skeleton.model))


def routed(path: Path) -> dict[str, set[int]]:
    """The experts that any token goes to in memory, by layer."""
    model = load(path)
    found = {name: set() for name in sparse_ffns(model)}
    for name, module in sparse_ffns(model).items():
        module.observer = lambda _gates, experts, name=name: found[name].update(experts.unique().tolist())
    with torch.inference_mode():
        for run in passes(model):
            run()
    return found


def test_every_weight_is_read_once_and_only_the_experts_that_tokens_go_to():
    path = tiny_nllb_moe("model", experts=32)
    used = routed(path)
    checkpoint = open_model(path)
    run = Run(checkpoint)
    run.run()
    resident = {place.name for place in run.skeleton.resident}
    expected = set(checkpoint.tensors) - resident
    for stage in run.skeleton.stages:
        if stage.mixture is not None:
            for expert in set(range(32)) - used[stage.mixture.layer.name]:
                expected -= {name for spec in stage.mixture.block(expert) for name in spec.names}
    assert any(len(experts) < 32 for experts in used.values())
    assert set(run.reads) == expected
    assert all(run.reads[name] == checkpoint.info(name).nbytes for name in expected)


def assert_clean(skeleton: EmptyModel) -> None:
    """No layer has weights, none is intercepted."""
    for stage in skeleton.stages:
        assert "forward" not in vars(stage.module)
        assert not any("forward" in vars(module) for module in stage.attentions)
        assert all(target.tensor.is_meta for target in stage.targets)
        if stage.mixture is not None:
            assert stage.mixture.module.runner is None
            assert all(getattr(stage.mixture.module, part).is_meta for part in EXPERT_PARTS)


def test_nothing_is_left_in_the_model():
    run = Run(open_model(tiny_nllb_moe("model")))
    run.run()
    assert_clean(run.skeleton)
    run.run()  # and it can be run again


# Blocks come in the order in which they are wanted, into buffers that are used again.


def two_buffers():
    checkpoint = open_model(tiny_nllb_moe("model"))
    skeleton = make_model(checkpoint, CPU, torch.float32)
    return skeleton.stages, Reader(checkpoint, 2, skeleton.widest_bytes, CPU)


def test_no_more_is_held_than_there_are_buffers():
    stages, made = two_buffers()
    with made as reader:
        for stage in stages[:3]:
            reader.want(stage.block)
        with reader.next_block() as first:
            with reader.next_block() as second:
                assert first[0].data_ptr() != second[0].data_ptr()
                assert not reader._begun  # the third waits
            with reader.next_block() as third:
                assert third[0].data_ptr() == second[0].data_ptr()


def test_the_thread_ends_with_blocks_unread():
    stages, made = two_buffers()
    with made as reader:
        for stage in stages:
            reader.want(stage.block)
    assert not any(thread.is_alive() for thread in reader._pool._threads)


def test_a_failure_comes_to_who_waits():
    checkpoint = open_model(tiny_nllb_moe("model"))
    block = (Spec(("no.such.tensor",), (3, 4), torch.float32),)
    with Reader(checkpoint, 2, block_bytes(block), CPU) as reader:
        reader.want(block)
        with pytest.raises(CheckpointError, match=r"no\.such\.tensor"), reader.next_block():
            pass
