"""Whether a training fits in memory, known before any weight is read."""

from __future__ import annotations

import torch

from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.cost import weight_bytes
from prunecli.modules.precision import TEACHER, WEIGHTS, Need, free_for_each
from prunecli.processes import ProcessGroup
from prunecli.tensors.dtypes import parse_dtype
from prunecli.training.options import TrainingOptions


def teacher_dtype(options: TrainingOptions) -> str:
    """The type that the teacher is computed in: that of the products."""
    return "bfloat16" if options.dtype == "bfloat16" else "float32"


def training_bytes(checkpoint: Checkpoint, options: TrainingOptions, processes: int) -> dict[str, int]:
    """What a training holds on its device, batches left out: part -> bytes."""
    weights = weight_bytes(checkpoint, "F32")
    parts = {WEIGHTS: weights, "gradients": weights, "Adam's moments": 2 * weights}
    if processes > 1:
        parts["gradients of all"] = weights
    if options.dtype == "bfloat16":
        parts["bfloat16 copies"] = weights // 2  # that autocast keeps for the backward pass
    if options.teacher is not None:
        with open_model(options.teacher) as teacher:
            parts[TEACHER] = weight_bytes(teacher, parse_dtype(teacher_dtype(options)))
    return parts


def require_room(
    checkpoint: Checkpoint, options: TrainingOptions, device: torch.device, process_group: ProcessGroup
) -> None:
    """Refuse what does not fit.

    Raises:
        MemoryShortError: with what each part would take.
    """
    parts = training_bytes(checkpoint, options, process_group.world_size)
    needs = [Need(checkpoint, device, torch.float32, parts, free_for_each(device, process_group))]
    if device.type != "cpu":  # where the weights are read
        host = torch.device("cpu")
        held = {WEIGHTS: parts[WEIGHTS]}
        needs.append(Need(checkpoint, host, torch.float32, held, free_for_each(host, process_group)))
    for need in needs:
        if not need.fits():
            raise need.refusal(trains=True)
