"""What a training holds in memory and on the disk, checked before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env

from prunecli.errors import PruneError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.cost import weight_bytes
from prunecli.modules.devices import Devices, place_name
from prunecli.modules.fitting import TEACHER, WEIGHTS, Need, free_for_each
from prunecli.processes import ProcessGroup
from prunecli.progress import Say, unsaid
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.quantities import bytes_text
from prunecli.training.options import TrainingOptions
from prunecli.training.parts import outputs_of, trained_parameters
from prunecli.training.watch import Keep

COUNTED_STEPS = 1_000_000
"""Updates among which the results that a training keeps are counted."""


def asked_to_shard() -> bool:
    """Whether accelerate's config asks for FSDP or DeepSpeed, which accelerate leaves out on a CPU."""
    return any(parse_flag_from_env(f"ACCELERATE_USE_{way}") for way in ("FSDP", "DEEPSPEED"))


def training_bytes(checkpoint: Checkpoint, options: TrainingOptions, processes: int) -> dict[str, int]:
    """What a training holds on its device, batches left out: part -> bytes."""
    weights = weight_bytes(checkpoint, "F32")
    trained = weights
    if options.train != "all" or options.lora is not None:
        trained = 4 * trained_parameters(checkpoint, options)
    parts = {WEIGHTS: weights, "gradients": trained, "Adam's moments": 2 * trained}
    if options.lora is not None:
        parts["low-rank updates"] = trained
    if processes > 1:
        parts["gradients of all"] = trained
    if options.dtype != "float32":
        parts[f"{options.dtype} copies"] = weights // 2  # that autocast keeps for the backward pass
    if options.teacher is not None:
        with open_model(options.teacher) as teacher:
            parts[TEACHER] = weight_bytes(teacher, parse_dtype(options.dtype))
    return parts


def disk_bytes(
    model: Any,
    source: Checkpoint,
    options: TrainingOptions,
    steps: range,
    dtype: str | None,
    keep: Keep | None,
) -> int:
    """Bytes that a training holds on the disk at most: its state, and its results.

    Args:
        model: the model, as it is trained.
        source: the checkpoint that training begins with.
        steps: number of updates done, and of all.
        dtype: type of the weights of the result. If None, as `source` stores them.
        keep: which results are kept in its course.
    """
    weights: int = sum(parameter.nbytes for parameter in model.parameters())
    learn: int = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    state = weights + 2 * learn  # with Adam's moments
    saves = -(-steps.stop // options.eval_every)
    result = sum(output.nbytes for output in outputs_of(source, source, dtype))
    kept = 0
    if keep is not None:
        due = sum(keep.is_due(step + 1) for step in steps[:COUNTED_STEPS])
        kept = weights + result * (
            due if options.minutes is None else min(due, 1)
        )  # time may end the run early
    # The Trainer keeps two states, and removes the third once it is written; the result is staged in float32.
    return max(min(saves, 3) * state, min(saves, 2) * state + weights + result) + kept


def require_room_to_draw(config: Path, parameters: int) -> None:
    """Refuse random weights that the machine has no memory for, in float32.

    Raises:
        PruneError: it has not.
    """
    needed, free = 4 * parameters, free_for_each(torch.device("cpu"))
    if needed > free:
        raise PruneError(
            f"{config}: its model of {parameters:,} parameters takes {bytes_text(needed)}; {bytes_text(free)} are free",
            "Make its sizes smaller.",
        )


def require_room(
    checkpoint: Checkpoint,
    options: TrainingOptions,
    device: torch.device,
    process_group: ProcessGroup,
    say: Say = unsaid,
) -> None:
    """Say what it takes, and refuse what does not fit.

    Raises:
        MemoryShortError: with what each part would take.
    """
    processes = process_group.world_size
    whole = parts = training_bytes(checkpoint, options, processes)
    if asked_to_shard() and device.type != "cpu":  # but for the teacher
        parts = {name: size if name == TEACHER else size // processes for name, size in whole.items()}
    free = [free_for_each(device, process_group)]
    needs = [Need(checkpoint, Devices(device), torch.float32, parts, free)]
    if device.type != "cpu":  # where each process reads all weights
        host = torch.device("cpu")
        free = [free_for_each(host, process_group)]
        needs.append(Need(checkpoint, Devices(host), torch.float32, {WEIGHTS: whole[WEIGHTS]}, free))
    for need in needs:
        if not need.fits():
            raise need.refusal(trains=True)
    count, learn = whole[WEIGHTS] // 4, whole["gradients"] // 4
    each = sum(size for name, size in parts.items() if name != TEACHER) / max(count, 1)
    detail = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    say(
        f"Training {learn:,} of {count:,} parameters takes {bytes_text(sum(parts.values()))} on {place_name(device)}, "
        f"{each:.1f} bytes a parameter ({detail}); batches come on top."
    )
