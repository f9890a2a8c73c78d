"""The type that models run in, and whether they fit in it; known before any weight is read.

If no type is asked for, the type depends on what is stored and on what the device multiplies well:

| stored | computed in, the first that fits |
| --- | --- |
| float32 and others | float32, bfloat16; a mixture of experts where grouped products are fast only bfloat16 |
| bfloat16 | bfloat16 where the device multiplies it natively; else float32, and on a CPU bfloat16 |
| float16 | on a GPU that multiplies it natively float16; else float32, and bfloat16 (on a GPU float16) |

Never bfloat16 unasked on a GPU that does not multiply it natively: torch only emulates it there. Never float16 unasked
for what is not stored so: hidden states of T5, Pegasus and Qwen2 overflow in it. Measured on one core of an AVX-512
BF16 EPYC, a layer of 8192 x 2048: 5 rows take 13.0 ms in float32, 3.6 in bfloat16, 9.3 in float16; 512 rows 233, 86 and
890.

int8 only where it is asked for, of models that run forward on a CPU: see `prunecli.modules.int8`.

A run takes its weights in a type, and what it holds beside them: `FREE_SHARE` of the free memory may be taken. Weights
wider than they are stored may take `WIDER_SHARE`. Where there are several GPUs, and one holds a model in none of its
types, its layers are spread over them: in the first type that fits so.
"""

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

import torch

from prunecli.errors import MemoryShortError, UnsupportedModelError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.cost import Load, decoding_bytes, stored_dtype, weight_bytes
from prunecli.modules.building import assemble
from prunecli.modules.cpu_linear import onednn_bfloat16
from prunecli.modules.dequantised import as_run
from prunecli.modules.devices import Devices, place_name, spread
from prunecli.modules.filling import DTYPES
from prunecli.modules.grouped import multiplies_groups
from prunecli.modules.int8 import require_int8
from prunecli.modules.machine import new_memory
from prunecli.private import cpu_has
from prunecli.processes import ALONE, ProcessGroup, neighbours
from prunecli.progress import Say, unsaid
from prunecli.tensors.dtypes import parse_computed, parse_dtype
from prunecli.tensors.quantities import bytes_text

COMPUTE = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
NATIVE_SINCE = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}
"""The compute capability from which a GPU multiplies a type by its tensor cores."""

FREE_SHARE = Fraction(9, 10)
"""The rest stays for the device's own needs and for fragmentation, as `inspect --fit` has it."""

WIDER_SHARE = Fraction(1, 2)
WEIGHTS = "weights"
TEACHER = "teacher"
Parts = Mapping[str, int]
"""What a run holds at once, by name: bytes."""

Beside = Callable[[Checkpoint, torch.dtype], Parts]
"""What a run holds beside the weights; by default nothing, where batches are small beside these."""


def candidates(
    name: str,
    checkpoints: Iterable[Checkpoint],
    device: torch.device,
    *,
    gradients: bool = False,
    only_runs: bool = False,
) -> tuple[torch.dtype, ...]:
    """The types that models may be computed in side by side, the best first: as asked for, or by the table.

    Models that would have different ones are compared in float32 or, where that does not fit, in bfloat16: else types
    would be compared, not models.

    Args:
        gradients: whether they are wanted: not of a float32 model in bfloat16; small ones vanish in float16.
        only_runs: whether the models only run forward, for what they put out: int8 may be asked for.

    Raises:
        UsageError: not one of float32, bfloat16, float16, auto, or int8 where it cannot run.
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
    has_experts = not checkpoint.runs_stock and bool(checkpoint.mixtures)
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
        # oneDNN multiplies bfloat16 on every AVX-512 processor, but only these do so faster than float32.
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        is_fast = onednn_bfloat16() and (not is_x86 or cpu_has("avx512_bf16", "amx_tile"))
        return dtype == torch.bfloat16 and is_fast
    return True


def _held(checkpoint: Checkpoint, dtype: torch.dtype, load: Load | None) -> dict[str, int]:
    """Bytes of the weights, and of attention cache and activations of decoding `load` if the family says them."""
    held = {WEIGHTS: weight_bytes(checkpoint, parse_dtype(str(dtype)))}
    width = torch.float32 if dtype == torch.int8 else dtype
    with suppress(UnsupportedModelError):
        if load is not None:
            held["decoding"] = sum(decoding_bytes(checkpoint, load, parse_dtype(str(width))))
    return held


@dataclass(frozen=True)
class Need:
    """Memory that one model needs in a number type.

    Attributes:
        parts: the weights, and what is held beside them.
        free: bytes of each device that are free for it.
        trains: whether the weights are trained, and so have to be in this type.
        by_layer: options before a size that would have the run go layer by layer, such as `--memory`; else empty.
    """

    checkpoint: Checkpoint
    devices: Devices
    dtype: torch.dtype
    parts: Parts
    free: Sequence[int]
    trains: bool = False
    by_layer: str = ""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    @property
    def room(self) -> int:
        """Bytes that weights of a smaller model could take, in this type."""
        weights = self.parts[WEIGHTS]
        grows = sum(size for name, size in self.parts.items() if self.trains and name != TEACHER) or weights
        left = FREE_SHARE * sum(self.free) - (self.total - grows)
        return max(0, int(left * weights / max(grows, 1)))

    def fits(self, share: Fraction = FREE_SHARE) -> bool:
        """Whether so much of what is free holds it."""
        return self.total <= share * self.free[0] or self.memory(share) is not None

    def memory(self, share: Fraction = FREE_SHARE) -> dict[int, int] | None:
        """GPU -> bytes that weights may take there; None if the model needs no second GPU, or does not fit."""
        if len(self.free) == 1 or not self.free[0] < self.total / share <= sum(self.free):
            return None
        beside = (self.total - self.parts[WEIGHTS]) // len(self.free)
        memory = {
            device.index: max(0, int(share * free) - beside)
            for device, free in zip(self.devices.all, self.free, strict=True)
        }
        checkpoint = self.checkpoint if self.checkpoint.runs_stock else as_run(self.checkpoint, self.dtype)
        model = assemble(checkpoint, self.dtype)
        return None if spread(model, memory) is None else memory

    def refusal(self) -> MemoryShortError:
        """The error that the model does not fit."""
        where = f"on {place_name(self.devices)} in {dtype_name(self.dtype)}"
        detail = ", ".join(f"{name} {bytes_text(size)}" for name, size in self.parts.items())
        path, free = self.checkpoint.path, bytes_text(sum(self.free))
        holds = len(self.free) > 1 and self.total <= FREE_SHARE * sum(self.free)
        indivisible = "; its layers do not find room side by side" if holds else ""
        return MemoryShortError(
            f"{path}: needs {bytes_text(self.total)} {where} ({detail}); "
            f"{free} are free, a tenth of it a reserve{indivisible}",
            "Free some memory, choose a smaller type or another device, or prune it first.",
            self,
        )


def fitting_dtype(
    checkpoints: Mapping[str, Checkpoint],
    devices: Devices,
    asked: str = "auto",
    *,
    load: Load | None = None,
    beside: Beside = lambda *_: {},
    gradients: bool = False,
    only_runs: bool = False,
    memory: int | None = None,
    by_layer: str = "",
    process_group: ProcessGroup = ALONE,
    say: Say = unsaid,
) -> torch.dtype:
    """The type that all of these models are computed in, one after another on `devices`.

    Args:
        checkpoints: label -> checkpoint.
        asked: a type, or "auto": the first of `candidates` that fits.
        load: what the models decode.
        beside: what is held beside the weights and what decoding takes.
        gradients, only_runs: as in `candidates`.
        memory: bytes within which the models run layer by layer: any size fits. If None, they are held whole.
        by_layer: as in `Need`.
        process_group: of several processes, each of which holds a model; all get the same type.
        say: hears of what is not computed in the type that it is stored in, and of what is spread.

    Raises:
        UsageError: no such type.
        MemoryShortError: one of them does not fit.
    """

    def parts(checkpoint: Checkpoint, dtype: torch.dtype) -> Parts:
        return {**_held(checkpoint, dtype, load), **beside(checkpoint, dtype)}

    tried = candidates(asked, checkpoints.values(), devices.first, gradients=gradients, only_runs=only_runs)
    best, place = tried[0], place_name(devices.first)

    def say_types(dtype: torch.dtype, free: int) -> None:
        """A line for all models of which the same is to be said."""
        alike: dict[tuple[torch.dtype, str], list[str]] = {}
        for label, checkpoint in checkpoints.items() if asked == "auto" else ():
            stored = stored_as(checkpoint)
            if stored != dtype:
                reason = ""
                if dtype != best:
                    whole = bytes_text(sum(parts(checkpoint, best).values()))
                    reason = f" (it would take {whole} in {dtype_name(best)}; {bytes_text(free)} are free)"
                alike.setdefault((stored, reason), []).append(label)
        for (stored, reason), labels in alike.items():
            computed = f"computed in {dtype_name(dtype)} on {place}{reason}"
            say(f"{', '.join(labels)}: stored as {dtype_name(stored)}, {computed}.")

    if memory is not None:
        say_types(best, 0)
        return best
    for among in dict.fromkeys((devices.alone, devices)):
        free = _free(among, process_group)
        for dtype in tried:
            needs = {
                label: Need(checkpoint, among, dtype, parts(checkpoint, dtype), free, by_layer=by_layer)
                for label, checkpoint in checkpoints.items()
            }
            is_last = dtype == tried[-1]  # what nothing else could take the place of may be as large as any
            if all(
                need.fits(
                    FREE_SHARE
                    if is_last or dtype.itemsize <= stored_as(need.checkpoint).itemsize
                    else WIDER_SHARE
                )
                for need in needs.values()
            ):
                say_types(dtype, sum(free))
                for label, need in needs.items():
                    say_spread(label, need, say)
                return dtype
    raise max(needs.values(), key=lambda need: need.total).refusal()


def need_of(
    checkpoint: Checkpoint,
    devices: Devices,
    dtype: torch.dtype,
    load: Load | None = None,
    process_group: ProcessGroup = ALONE,
) -> Need:
    """Return the memory that a model needs on the first device; on all of them, if the first does not hold it."""
    parts = _held(checkpoint, dtype, load)
    need = Need(checkpoint, devices.alone, dtype, parts, _free(devices.alone, process_group))
    # The other GPUs are asked only then: to ask one takes some of its memory.
    if devices.others and not need.fits():
        need = Need(checkpoint, devices, dtype, parts, _free(devices, process_group))
    return need


def _free(devices: Devices, process_group: ProcessGroup) -> list[int]:
    """Bytes of each device; 0 of a further one that another process has for itself."""
    free = [free_for_each(devices.first, process_group)]
    for device in devices.others:
        try:
            free.append(new_memory(device))
        except RuntimeError:
            free.append(0)
    return free


def say_spread(label: str, need: Need, say: Say) -> None:
    """A line for a model that several GPUs hold together."""
    if need.memory() is not None:
        first = need.devices.first
        say(
            f"{label}: takes {bytes_text(need.total)}, {bytes_text(need.free[0])} of {first} are free: its layers are "
            f"spread over {place_name(need.devices)}."
        )


def free_for_each(device: torch.device, process_group: ProcessGroup = ALONE) -> int:
    """Bytes of `device` that each of several processes can have for its model."""
    if process_group.world_size == 1:
        return new_memory(device)
    return min(process_group.all_gather(new_memory(device) // neighbours(device.type)))
