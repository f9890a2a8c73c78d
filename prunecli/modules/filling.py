"""Where a checkpoint's tensors belong in a model, and how they get there: read into their final place."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from prunecli.errors import CheckpointError, PruneError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import REMEDY, TIE_KEY
from prunecli.model.skeleton import skeleton_of
from prunecli.tensors.reader import TensorReader

CHUNK_BYTES = 16 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of types -> torch's."""

ALIGNMENT = 64
"""A tensor begins in a buffer at a multiple of this number of bytes."""


class Staging:
    """Room on the host for what is read before it goes where it belongs.

    For a GPU there are two such rooms, in pinned memory: one is read into while the other is copied, and the host waits
    for neither but to read into it again. Copies are of the stream that is current, and values are cast there.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._buffers: list[Tensor] = []
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._raw: Tensor | None = None

    def room(self, nbytes: int, device: torch.device) -> memoryview:
        """Return the part of the buffer into which the next `nbytes` are read."""
        is_gpu = device.type == "cuda"
        if not self._buffers:
            made = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(1 + is_gpu)]
            self._buffers = [buffer.pin_memory() for buffer in made] if is_gpu else made
        self._turn = (self._turn + 1) % len(self._buffers)
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        view: memoryview = self._buffers[self._turn].numpy().data
        return view[:nbytes]

    def send(self, target: Tensor, dtype: torch.dtype) -> None:
        """Have `target` `[values]` take what was read last, values of the type `dtype`."""
        read = self._buffers[self._turn][: target.numel() * dtype.itemsize]
        if not target.is_cuda:
            target.copy_(read.view(dtype))
            return
        if target.dtype != dtype:  # cast there
            if self._raw is None or self._raw.device != target.device or len(self._raw) < len(read):
                self._raw = target.new_empty(len(read), dtype=torch.uint8)
            read = self._raw[: len(read)].copy_(read, non_blocking=True)
        target.copy_(read.view(dtype), non_blocking=True)
        self._copied[self._turn] = torch.cuda.current_stream(target.device).record_event()


@dataclass(frozen=True)
class Spec:
    """One tensor to be read.

    Attributes:
        names: of the tensors in the checkpoint whose rows, one after another, make it up.
        shape: of the tensor.
        dtype: that it is computed in.
        entry: number along the first axis of the one tensor in the checkpoint; None: all of it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    entry: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a buffer."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


Block = tuple[Spec, ...]
"""What is read, and held, together: a layer without its experts, or one expert."""


def block_bytes(block: Iterable[Spec]) -> int:
    """Bytes that a block takes in a buffer."""
    return sum(spec.nbytes for spec in block)


@dataclass(frozen=True)
class Destination:
    """Attribute of a module that a tensor of the checkpoint fills.

    Attributes:
        name: in the checkpoint.
        module: that has the attribute.
        attribute: of the module: a parameter or a buffer, of the right shape.
        dtype: that the model runs it in.
    """

    name: str
    module: nn.Module
    attribute: str
    dtype: torch.dtype

    @property
    def tensor(self) -> Tensor:
        """Present tensor of the attribute."""
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor

    @property
    def spec(self) -> Spec:
        """The tensor that is read into it."""
        return Spec((self.name,), tuple(self.tensor.shape), self.dtype)

    def put(self, tensor: Tensor) -> None:
        """Have the module hold `tensor`."""
        if isinstance(self.tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=self.tensor.requires_grad)
        setattr(self.module, self.attribute, tensor)


def read_into(
    tensor: Tensor, checkpoint: TensorReader, name: str, staging: Staging, entry: int | None = None
) -> None:
    """Read a tensor of the checkpoint into `tensor`, contiguous and of its shape; or one entry along its first axis.

    Of another type, or on another device, it takes the values chunk by chunk; else the bytes go where they belong. On a
    GPU it has them when the current stream has come so far.

    Args:
        tensor: `[*shape of the checkpoint's]`.
        staging: room for what is not read into its place.

    Raises:
        CheckpointError: it cannot be read, or is of another shape or of a type that no model runs in.
    """
    info = checkpoint.info(name)
    require_shape(tensor, checkpoint, name, entry)
    nbytes = info.nbytes if entry is None else info.nbytes // info.shape[0]
    first = nbytes * (entry or 0)
    if info.dtype not in DTYPES:
        raise CheckpointError(
            f"{checkpoint.path}: {name} is of the type {info.dtype}, which no model runs in"
        )
    source, flat = DTYPES[info.dtype], tensor.detach().view(-1)
    is_same = flat.device.type == "cpu" and flat.dtype == source
    target = flat.view(torch.uint8).numpy().data if is_same else None
    for start in range(0, nbytes, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, nbytes)
        if target is not None:
            checkpoint.read_range(name, first + start, target[start:end])
            continue
        checkpoint.read_range(name, first + start, staging.room(end - start, flat.device))
        staging.send(flat[start // source.itemsize : end // source.itemsize], source)


def read_spec(tensor: Tensor, checkpoint: Checkpoint, spec: Spec, staging: Staging) -> int:
    """Read what `spec` says into `tensor`; returns the bytes that it takes in the checkpoint.

    Raises:
        CheckpointError: as `read_into`.
    """
    shapes, parts = [checkpoint.info(name).shape for name in spec.names], [tensor]
    if len(shapes) > 1:  # else the tensor may be a scalar
        rows = [shape[0] for shape in shapes]
        if sum(rows) != len(tensor):
            raise CheckpointError(
                f"{checkpoint.path}: {' and '.join(spec.names)} have {sum(rows)} rows, the model wants {len(tensor)}"
            )
        parts = [*torch.split(tensor, rows)]
    for name, part in zip(spec.names, parts, strict=True):
        read_into(part, checkpoint, name, staging, spec.entry)
    nbytes = sum(map(checkpoint.stored_bytes, spec.names))
    return nbytes if spec.entry is None else nbytes // shapes[0][0]


def tensors_of(
    checkpoint: TensorReader, names: Iterable[str], dtype: torch.dtype | None = None
) -> Iterator[Tensor]:
    """The tensors of these names, one after another, in the type `dtype`; if None, each as it is stored.

    Raises:
        CheckpointError: as `read_into`.
    """
    staging = Staging()
    for name in names:
        info = checkpoint.info(name)
        tensor = torch.empty(info.shape, dtype=dtype or DTYPES.get(info.dtype))
        read_into(tensor, checkpoint, name, staging)
        yield tensor
        del tensor  # before the next one is made


def fill(
    targets: Iterable[Destination],
    checkpoint: Checkpoint,
    device: torch.device,
    where: Mapping[int, torch.device] = MappingProxyType({}),
    put: Callable[[Destination, Tensor], None] = Destination.put,
) -> None:
    """Read the tensors of the checkpoint that belong there into new memory.

    Args:
        device: where tensors go.
        where: id of a module -> where its tensors go instead.
        put: has a module hold a tensor that was read.

    Raises:
        CheckpointError: as `read_into`.
    """
    staging = Staging()
    for target in targets:
        place = where.get(id(target.module), device)
        tensor = torch.empty(target.tensor.shape, dtype=target.dtype, device=place)
        read_into(tensor, checkpoint, target.name, staging)
        put(target, tensor)


def require_shape(tensor: Tensor, checkpoint: TensorReader, name: str, entry: int | None = None) -> None:
    """Refuse a tensor of the checkpoint, or an entry along its first axis, that is not of the shape of `tensor`.

    Raises:
        CheckpointError: it is not.
    """
    stored, what = checkpoint.info(name).shape, name
    if entry is not None:
        stored, what = stored[1:], f"an entry of {name}"
    if tuple(tensor.shape) != stored:
        raise CheckpointError(
            f"{checkpoint.path}: {what} has the shape {list(stored)}, the model wants {list(tensor.shape)}"
        )


def missing_tensors(checkpoint: Checkpoint, names: Sequence[str]) -> CheckpointError:
    """Return the error about tensors that a model needs and the checkpoint lacks."""
    few = ", ".join((*names[:3], "…") if len(names) > 3 else names)
    what = f"{len(names)} tensors are missing ({few})" if len(names) > 1 else f"a tensor is missing ({few})"
    remedy = REMEDY
    tied: Mapping[str, str] = {}
    with suppress(PruneError):
        one = skeleton_of(checkpoint).changed({TIE_KEY: True})
        tied = {} if one is None else one.model.all_tied_weights_keys
    if all(tied.get(name) in checkpoint.tensors for name in names):
        same = ", ".join(f"{tied[name]} as {name}" for name in names)
        remedy = f"transformers before version 5 left out what was one parameter for it: store {same} too."
    return CheckpointError(f"{checkpoint.path}: {what}", remedy)
