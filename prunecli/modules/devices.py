"""The devices that a model runs on: their names, how a model is spread over several GPUs, and errors of full ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from prunecli.errors import UsageError
from prunecli.private import undivided_modules, unmoved_arguments
from prunecli.processes import world_size
from prunecli.tensors.quantities import bytes_text

OLDEST_OF_CUDA_13 = (7, 5)
"""Cards of a lower compute capability have kernels in builds for CUDA 12.6 alone; torch 2.14 is the last of them."""

OLDER_WHEELS = 'pip install "torch<2.15" --index-url https://download.pytorch.org/whl/cu126'
NO_KERNELS = "no kernel image"

FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What torch says where a device has no more memory."""

FULL_HOST = ("can't allocate memory", "not enough memory")
"""The same of the host."""


@dataclass(frozen=True)
class Devices:
    """Devices that a model runs on.

    Attributes:
        first: that holds it where it can; inputs go there, and outputs are there.
        others: GPUs that its layers are spread over too, where the first does not hold it.
    """

    first: torch.device
    others: tuple[torch.device, ...] = ()

    @property
    def all(self) -> tuple[torch.device, ...]:
        """Each of them."""
        return (self.first, *self.others)

    @property
    def alone(self) -> Devices:
        """The first."""
        return Devices(self.first)


def choose_devices(name: str) -> Devices:
    """Return the device of `choose_device`, or for `auto` all GPUs of this process.

    One of a lower compute capability than the first is left out, which is asked what a model may be computed in. Of
    several processes each has a GPU of its own, and that alone.

    Raises:
        UsageError: as `choose_device`.
    """
    device = choose_device(name)
    if name != "auto" or device.type != "cuda" or torch.cuda.device_count() < 2 or world_size() > 1:
        return Devices(device)
    first = torch.device("cuda", torch.cuda.current_device())
    cards = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    asked = torch.cuda.get_device_capability
    return Devices(first, tuple(card for card in cards if card != first and asked(card) >= asked(first)))


def place_name(devices: torch.device | Devices) -> str:
    """How a sentence calls them: `the CPU`, `cuda:0`, `cuda:0, cuda:1 and cuda:2`."""
    all_of_them = devices.all if isinstance(devices, Devices) else (devices,)
    *names, last = ["the CPU" if device.type == "cpu" else str(device) for device in all_of_them]
    return f"{', '.join(names)} and {last}" if names else last


def devices_of(model: Any) -> tuple[torch.device, ...]:
    """Return the devices that hold a model, the one of its inputs first."""
    held: Iterable[torch.Tensor] = model.parameters()
    return tuple(dict.fromkeys((model.device, *(tensor.device for tensor in held))))


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto` is a GPU where there is one.

    A GPU is tried: the CPU never takes the place of one that torch finds and cannot use.

    Raises:
        UsageError: torch does not know it, the machine lacks it, or torch cannot use it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        return _tried(torch.device(name), "auto")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"`device={name}`: no such device", "Try auto, cpu, cuda or cuda:1.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"`device={name}`: torch finds no GPU here", "Try `device=cpu`.")
    return _tried(device, name)


def found_device() -> torch.device:
    """A GPU where there is one that can be used, else the CPU: for what is said of a machine."""
    try:
        return choose_device("auto")
    except UsageError:
        return torch.device("cpu")


def _tried(device: torch.device, name: str) -> torch.device:
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        if device.type == "cuda" and NO_KERNELS in str(error):
            capability = torch.cuda.get_device_capability(device)
            built = ", ".join(torch.cuda.get_arch_list())
            wheels = OLDER_WHEELS if capability < OLDEST_OF_CUDA_13 else "pip install --upgrade torch"
            raise UsageError(
                f"`device={name}`: torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)} "
                f"(sm_{capability[0]}{capability[1]}; it has those of {built})",
                f"Install wheels that have them: {wheels}; or continue without the GPU: `device=cpu`.",
            ) from None
        others = "auto, cpu, cuda or cuda:1" if name != "auto" else "cpu, or another GPU as cuda:1"
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise UsageError(f"`device={name}`: torch cannot use it here ({reason})", f"Try {others}.") from None
    return device


def full_device(error: BaseException) -> str | None:
    """Name of the device whose memory was short: `cuda:0 (31.74 GiB, 0.21 GiB free)`, "the host".

    None: `error` says something else. torch raises an error of its own where its allocator finds no block, another
    where CUDA says so itself, and plain ones for cuBLAS, which wants a workspace, and for the host.
    """
    said = str(error)
    if not isinstance(error, RuntimeError):
        return None
    if any(words in said for words in FULL_HOST):
        return "the host"
    if isinstance(error, torch.OutOfMemoryError) or any(words in said for words in FULL):
        return _filling()
    return None


def _filling() -> str:
    """How full the current GPU is, where that can still be asked."""
    if not torch.cuda.is_available():
        return "the device"
    try:
        device = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(device)
        here = torch.cuda.memory_reserved(device)
    except RuntimeError:  # an error of CUDA stays for the rest of the process
        return "the GPU"
    return f"cuda:{device} ({bytes_text(total)}, {bytes_text(here)} of it this process's, {bytes_text(free)} free)"


def spread(model: Any, memory: Mapping[int, int]) -> dict[str, torch.device] | None:
    """Which GPU each module is on, all about equally full where that is possible; None if they do not hold the model.

    Modules are placed in their order. Layers and sparse FFNs are not split; modules that share parameters are together.

    Args:
        model: of transformers, tied; may be on the meta device.
        memory: GPU -> bytes that the weights may take there.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes, get_balanced_memory

    whole = [*undivided_modules(model), "SparseFFN"]
    sizes = compute_module_sizes(model)
    largest = max(
        (sizes[name] for name, module in model.named_modules() if type(module).__name__ in whole), default=0
    )
    first = min(memory)
    balanced = get_balanced_memory(model, dict(memory), whole)
    # On the first GPU accelerate reserves memory for the largest of the layers to come, in case one is on the CPU.
    for limits, reserved in product((balanced, dict(memory)), (largest, 0)):
        placed = infer_auto_device_map(model, limits | {first: limits[first] + reserved}, whole)
        used = Counter[Any]()
        for name, number in placed.items():
            used[number] += sizes[name]
        if all(size <= memory.get(number, 0) for number, size in used.items()):
            return {name: torch.device("cuda", number) for name, number in placed.items()}
    return None


def module_devices(model: nn.Module, placed: Mapping[str, torch.device]) -> dict[int, torch.device]:
    """Id of each module, of those that `spread` placed -> its GPU."""
    modules = dict(model.named_modules())
    return {
        id(part): device
        for name, device in placed.items()
        if name in modules
        for part in modules[name].modules()
    }


def dispatch(model: Any, placed: Mapping[str, torch.device]) -> None:
    """Have each module move its inputs to its own GPU, and the model its outputs to where its inputs are.

    Args:
        placed: as `spread` returns it, nothing if the model is on one device.
    """
    if placed:
        from accelerate import dispatch_model

        first = next(iter(placed.values()))
        dispatch_model(model, dict(placed), first, skip_keys=unmoved_arguments(model))
