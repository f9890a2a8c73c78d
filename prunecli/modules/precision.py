"""The type that models run in where nobody asks for one: by what is stored and what is multiplied well.

| stored | computed in, the first that fits |
| --- | --- |
| float32 and others | float32, bfloat16; a mixture of experts where grouped products are fast only bfloat16 |
| bfloat16 | bfloat16 where the device multiplies it natively; else float32, and on a CPU bfloat16 |
| float16 | on a GPU that multiplies it natively float16; else float32, and bfloat16 (on a GPU float16) |

Never bfloat16 unasked on a GPU that does not multiply it natively: torch only emulates it there. Never float16 unasked
for what is not stored so: hidden states of T5, Pegasus and Qwen2 overflow in it. Measured on one core of an AVX-512
BF16 EPYC, a layer of 8192 x 2048: 5 rows take 13.0 ms in float32, 3.6 in bfloat16, 9.3 in float16; 512 rows 233, 86 and
890.

int8 only where it is asked for, of models that run forward on a CPU: see `prunecli.modules.int8`. Which of the types
fits is the matter of `prunecli.modules.fitting`.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable

import torch

from prunecli.model.checkpoint import Checkpoint
from prunecli.model.cost import stored_dtype
from prunecli.modules.cpu_linear import onednn_bfloat16
from prunecli.modules.devices import place_name
from prunecli.modules.filling import DTYPES
from prunecli.modules.grouped import multiplies_groups
from prunecli.modules.int8 import require_int8
from prunecli.tensors.dtypes import parse_computed

COMPUTE = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
NATIVE_SINCE = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}
"""The compute capability from which a GPU multiplies a type by its tensor cores."""


def choose_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The type that is asked for; for "auto" the one that a model of any size is computed in (see the table).

    Raises:
        UsageError: not one of float32, bfloat16, float16, auto.
    """
    return candidates(name, [checkpoint], device)[0]


def candidates(
    name: str,
    checkpoints: Iterable[Checkpoint],
    device: torch.device,
    *,
    gradients: bool = False,
    only_runs: bool = False,
) -> tuple[torch.dtype, ...]:
    """The types that models may be computed in side by side, the best first.

    Models that would have different ones are compared in float32 or, where that does not fit, in bfloat16: else types
    would be compared, not models.

    Args:
        gradients: whether they are wanted: not of a float32 model in bfloat16; small ones vanish in float16.
        only_runs: whether the models only run forward, for what they put out: int8 may be asked for.

    Raises:
        UsageError: as `choose_dtype`; int8 where it cannot run.
        UnsupportedModelError: int8 of a model that prunecli does not build.
    """
    name = parse_computed(name, also=("auto", "int8") if only_runs else ("auto",))
    if name == "int8":
        require_int8(device, checkpoints)
    if name != "auto":
        return (COMPUTE[name],)
    natural = {_natural(checkpoint, device, gradients=gradients) for checkpoint in checkpoints}
    alike = natural.pop() if len(natural) == 1 else ()
    in_float16 = torch.float16 in alike
    return alike if alike and not (gradients and in_float16) else _wide(device)


def stored_as(checkpoint: Checkpoint) -> torch.dtype:
    """The floating-point type of most of its bytes."""
    return DTYPES.get(stored_dtype(checkpoint), torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float16 -> "float16"."""
    return str(dtype).removeprefix("torch.")


def _natural(checkpoint: Checkpoint, device: torch.device, *, gradients: bool) -> tuple[torch.dtype, ...]:
    stored = stored_as(checkpoint)
    if stored in NATIVE_SINCE and multiplies_natively(stored, device):
        return (stored,)
    if stored == torch.float16 and device.type != "cpu":
        return (torch.float32, stored)
    has_experts = checkpoint.architecture is not None and bool(checkpoint.mixtures)
    if stored not in NATIVE_SINCE and has_experts and not gradients and multiplies_groups(device):
        return (torch.bfloat16,)
    return _wide(device)


def _wide(device: torch.device) -> tuple[torch.dtype, ...]:
    """float32, and bfloat16 but on a GPU that only emulates it."""
    emulates = device.type == "cuda" and not multiplies_natively(torch.bfloat16, device)
    return (torch.float32,) if emulates else (torch.float32, torch.bfloat16)


def multiplies_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of a 16-bit type are faster there than those of float32, for few rows and for many."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= NATIVE_SINCE[dtype]
    if device.type == "cpu":
        return dtype == torch.bfloat16 and _cpu_bfloat16()
    return True


def _cpu_bfloat16() -> bool:
    """Instructions for it: oneDNN multiplies bfloat16 on every AVX-512 processor, but only these do so faster."""
    if not onednn_bfloat16():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def type_line(labels: Iterable[str], stored: torch.dtype, dtype: torch.dtype, device: torch.device) -> str:
    """What is said of models that are not computed in the type that they are stored in."""
    where = place_name(device)
    return f"{', '.join(labels)}: stored as {dtype_name(stored)}, computed in {dtype_name(dtype)} on {where}"
