"""What a run keeps on disk while it trains, so that the same command goes on after an interrupt.

OUTPUT.training/
    run.json        what the result depends on
    initial/        the random weights of a run from scratch
    checkpoint-N/   after N updates: weights, optimizer, schedule, random numbers, the Trainer's state
    result/         the weights of the result, in float32
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerState

from prunecli.errors import CheckpointError, OutputError, UsageError, damaged
from prunecli.processes import ProcessGroup
from prunecli.progress import Say
from prunecli.tensors.documents import write_json
from prunecli.tensors.json_files import lenient, read_json
from prunecli.tensors.unfinished import acquire

FORMAT = "prunecli.finetune-state/1"
RUN = "run.json"
WEIGHTS, TRAINER_STATE = "model.safetensors", "trainer_state.json"


def state_directory(output: Path) -> Path:
    """Directory of the state of the run that makes `output`: OUTPUT.training beside it."""
    return output.absolute().with_name(f"{output.name}.training")


@contextmanager
def sole_writer(output: Path) -> Iterator[None]:
    """Only one process at a time trains what becomes `output`; a process that ended, however it did, holds nothing.

    Raises:
        OutputError: another one does.
    """
    path = output.absolute().with_name(f".{output.name}.training.pid")
    try:
        held = acquire(path)
    except BlockingIOError:
        raise OutputError(
            f"{output}: another run trains it now (process {path.read_text() or 'unknown'})",
            "Wait until it has ended, or choose another `output`.",
        ) from None
    try:
        if held is not None:
            os.truncate(held, 0)
            os.write(held, str(os.getpid()).encode())
        yield
    finally:
        if held is not None:
            path.unlink(missing_ok=True)
            os.close(held)


HASHED = {
    "source": "the checkpoint",
    "bytes": "the checkpoint",
    "config": "config.json",
    "vocabulary": "the tokenizer",
    "train": "the training text",
    "valid": "the validation text",
    "teacher": "the teacher",
}
"""Keys of a run's identity that stand for files -> what these are."""


def prepare_state(state: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
    """Make the directory, or check that what it holds is of this very run.

    Args:
        identity: everything that the weights depend on; JSON values, for keys of `HASHED` the files' names -> hashes.
            Files may be moved.
        resume: go on from what is there; else it is removed.

    Raises:
        UsageError: it is of another run; with the first difference.
        OutputError: it holds something else.
    """
    run = state / RUN
    if not resume and run.is_file():
        shutil.rmtree(state)
    if run.is_file():
        kept = lenient(read_json)(run, FORMAT) or {}
        # 0.2.0 has names and hashes of files in the second.
        held, inputs = kept.get("run"), kept.get("inputs", {})
        if not isinstance(held, dict) or not isinstance(inputs, dict):
            raise UsageError(f"{run}: damaged", "Start over with `resume=never`.")
        before: dict[str, Any] = held | inputs
        for key, now in json.loads(json.dumps(identity)).items():
            was: Any = before.get(key)
            if key in HASHED and not isinstance(was, dict):
                was = {}
            if key in HASHED and [was[name] for name in sorted(was)] != [now[name] for name in sorted(now)]:
                changed = [name for name, digest in now.items() if was.get(name, digest) != digest]
                if changed or not was:
                    what = f"{HASHED[key]} changed" + (f" ({', '.join(changed)})" if changed else "")
                else:
                    what = f"{HASHED[key]} was {', '.join(was)}, now it is {', '.join(now) or 'none'}"
            elif key not in HASHED and was != now:
                what = f"{key} was {was}, now it is {now}"
            else:
                continue
            raise UsageError(
                f"{state}: the state of another run: {what}",
                "Repeat the first command to resume it; or start over with `resume=never`; or choose another `output`.",
            )
        return
    if state.exists() and (not state.is_dir() or any(state.iterdir())):
        raise OutputError(f"{state}: exists, but holds no run of prunecli", "Choose another `output`.")
    state.mkdir(exist_ok=True)
    write_json(run, {"format": FORMAT, "run": dict(identity)})


def last_checkpoint(state: Path) -> Path | None:
    """The latest checkpoint that was written to its end."""
    read = lenient(TrainerState.load_from_json)
    found = {
        int(path.parent.name.rpartition("-")[2]): path.parent
        for path in state.glob(f"checkpoint-*/{TRAINER_STATE}")
        # Of one process's files it is the last; the others' random numbers are checked by the Trainer.
        if path.parent.name.rpartition("-")[2].isdecimal() and read(str(path)) is not None
    }
    return found[max(found)] if found else None


def sound_state(checkpoint: Path) -> Any:
    """Return the Trainer's state of a checkpoint that training can go on from: step, best metric, log, callbacks.

    Raises:
        CheckpointError: one of its files is damaged.
    """
    with damaged(f"{checkpoint}: damaged", "Start over with `resume=never`."):
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        kinds = {"best_model_checkpoint": str, "best_global_step": int, "best_metric": int | float}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(state, name), kind | None):
                raise TypeError(f"{name} {value!r}")
        for counters in state.stateful_callbacks.values():
            dict(counters.get("attributes", {}).items())
        for path in (*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")):
            if not path.name.startswith("rng_state"):  # which holds numpy's, beside tensors
                torch.load(path, map_location="cpu", weights_only=True)
        load_file(checkpoint / WEIGHTS)
        return state


def load_weights(model: Any, directory: Path) -> None:
    """Load the weights that a checkpoint of the training stores.

    Raises:
        CheckpointError: it is of another model.
    """
    try:
        fill(model, load_file(directory / WEIGHTS))
    except ValueError as error:
        raise CheckpointError(
            f"{directory}: holds the weights of another model", "Start over with `resume=never`."
        ) from error


def fill(model: Any, kept: Mapping[str, Tensor]) -> None:
    """Copy weights into the model's parameters of the same names.

    Raises:
        ValueError: names or shapes differ.
    """
    places = dict(model.named_parameters())
    if kept.keys() != places.keys() or any(kept[name].shape != place.shape for name, place in places.items()):
        raise ValueError("other names or shapes")
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(kept[name])


WORKSPACE, FIXED = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""What has cuBLAS add in one order; it looks at it at its first product. 8 buffers of 4 MiB on each GPU."""

NONE_THERE = "does not have a deterministic implementation"
"""What torch says where it lacks one."""


@contextmanager
def fixed_order(device: torch.device, *, warn_only: bool) -> Iterator[None]:
    """Within the block a GPU computes in one order; on a CPU it always does.

    Args:
        warn_only: let pass what torch cannot compute so. torch's warnings of it are not shown.
    """
    if device.type != "cuda":
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    memory.fill_uninitialized_memory = False  # whatever is made is written before it is read
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic")
            yield
    finally:
        memory.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def repeatable(
    device: torch.device, probe: Callable[[], None] | None, process_group: ProcessGroup, say: Say
) -> Iterator[None]:
    """`fixed_order` as far as torch has kernels for what a model computes.

    Many kernels of a GPU add in an order that is another one each time; torch has others, somewhat slower, for most of
    them. They are asked for, and where a model needs one that torch lacks, that is found by one batch, and said.

    Args:
        probe: a batch forwards and back, which leaves nothing behind but random numbers drawn; training seeds anew.
            None: it cannot be asked, and what torch lacks is let pass.
        say: hears of what torch cannot.
    """
    lacking = None
    # Strict where it can be: where torch only warns, attention takes kernels that add in any order.
    with fixed_order(device, warn_only=probe is None):
        try:
            if probe is not None and device.type == "cuda":
                probe()
        except RuntimeError as error:
            operation, found, _ = str(error).partition(NONE_THERE)
            if not found:
                raise
            lacking = operation.strip()
        if lacking := next(filter(None, process_group.all_gather(lacking)), None):
            say(
                f"{lacking} adds in no fixed order on a GPU: a run that is interrupted, or repeated, may end with "
                "other last digits."
            )
            torch.use_deterministic_algorithms(True, warn_only=True)
        yield
