"""Two processes that know of each other do what one does with twice the batches of an update."""

from pathlib import Path

import numpy as np
import pytest

from prunecli.model.checkpoint import open_model
from prunecli.text.choice import TextChoice
from prunecli.training.finetune import Destination, finetune
from tests.commands.calls import names
from tests.contracts.method_contract import written
from tests.families import tiny_family
from tests.forked import ended, start
from tests.selections import kept_heads
from tests.training.runs import CALM, options, train, translation, write_parallel

SMALL = "--batch-tokens 100 --steps 4 --eval-every 2 --warmup 1 --device cpu"


@pytest.fixture(autouse=True)
def _folder():
    tiny_family("model", "m2m_100", max_position_embeddings=32, **CALM)  # at which searches end
    write_parallel("data", train=40, val=3)


def _start(*lines):
    return ended(start("finetune model --data data", *lines))


def _assert_nearly_equal(source, one, other):
    """Two models trained from `source` differ by little of what training changed."""
    before, first, second = (open_model(path) for path in (source, one, other))
    assert dict(first.tensors) == dict(second.tensors)
    moved = np.mean([np.abs(first.read(name) - before.read(name)).mean() for name in first.tensors])
    apart = np.mean([np.abs(first.read(name) - second.read(name)).mean() for name in first.tensors])
    assert apart < 0.02 * moved


def test_two_processes_make_the_model_of_one():
    first, second = _start(SMALL, "--measure chrf++ --learning-rate 1e-3 -o out")
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert first[1].count("Written: out") == 1
    assert first[2].count("step 2:") == 1
    assert "Written" not in second[1]  # the first process alone speaks
    assert "step 2:" not in second[2]
    assert not Path("out.training").exists()
    made = options(steps=4, warmup=1, accumulate=2, metric="chrf++")
    _assert_nearly_equal("model", train("model", "one", made, translation(40, 3)).staged, "out")


SHARDING = """
import os
from accelerate import state
from accelerate.utils import FullyShardedDataParallelPlugin
from prunecli.commands.app import main
from prunecli.training.trainer import Watch

made = state.AcceleratorState.__init__

def sharding(self, *arguments, fsdp_plugin=None, **more):
    made(self, *arguments, fsdp_plugin=fsdp_plugin, **more)
    if self.distributed_type == state.DistributedType.MULTI_CPU:
        self.distributed_type = state.DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin or FullyShardedDataParallelPlugin()

state.AcceleratorState.__init__ = sharding
os.environ.update(
    ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
    FSDP_STATE_DICT_TYPE="FULL_STATE_DICT", FSDP_RESHARD_AFTER_FORWARD="true",
)
main()
"""
"""The command, with accelerate made to shard on a CPU too: accelerate itself does so on accelerators alone."""

_DEATH = "Watch.on_log = lambda _, args, state, *__, **___: state.global_step == 4 and os._exit(9) or None"
DYING = SHARDING.replace("\nmain()", f"\n{_DEATH}\nmain()")
"""The same, killed at the last update."""


def test_sharded_weights_make_the_model_of_whole_ones():
    """The results are whole: that of the first updates, and that of a run that was killed and repeated."""
    source = tiny_family("full", "gpt2")
    written(source, kept_heads({open_model(source).layout.attentions[0].name: (1,)}), "reduced")
    text, held_out = (Path(f"data/{split}.eng_Latn") for split in ("train", "val"))
    choice, valid = (TextChoice(files=(path,)) for path in (text, held_out))
    destination, made = Destination(Path("whole"), save_every=2), options(steps=4, warmup=1, accumulate=2)
    finetune(Path("reduced"), choice, destination, made, valid=valid)
    run = f"finetune reduced --text {text} --valid-text {held_out} {SMALL} --learning-rate 1e-3"
    run = f"{run} --save-every 2 -o out"
    assert [status for status, _, _ in ended(start(run, code=DYING))] == [9, 9]
    found = ended(start(run, code=SHARDING))
    assert [status for status, _, _ in found] == [0, 0], found[0][2] + found[1][2]
    assert "Resuming from step 2" in found[0][2]
    assert "each process holds" not in found[0][2]
    for name in ("", ".steps/step-2"):
        _assert_nearly_equal("reduced", f"whole{name}", f"out{name}")


def test_a_failure_of_all_is_said_and_leaves_nothing():
    for status, _, err in _start(SMALL, "--pairs eng_Latn-xxx_Latn -o out"):
        assert status == 1
        assert "Error: unknown language 'xxx_Latn'" in err
    assert names() == ["data", "model"]
