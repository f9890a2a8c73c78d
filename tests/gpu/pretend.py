"""GPUs where there are none: tensors that say they are on cuda:0 and are computed on the CPU; what a GPU would cost.

Within `Pretend` functions of torch see what they would see of a GPU: what is made on "cuda", or of what is there, is a
`Card`; two devices in one call are refused, as torch refuses them. Counted by line of prunecli, else of transformers:
waits of the host for a device, copies to one, and from one to another. What torch does inside of one of its functions
is not seen: bytes are those of tensors that Python holds, times are none, and kernels' rounding is the CPU's.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu.streams import Event, Timeline

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")

_ONCE = (
    "item tolist __bool__ __int__ __float__ __index__ __contains__ __repr__ nonzero argwhere masked_select equal "
    "allclose unique unique_consecutive multinomial repeat_interleave"
)
WAITING = {**dict.fromkeys(_ONCE.split(), 1), "bincount": 2}  # the largest value, and the smallest
"""Functions that read what the device has computed -> how often."""

NO_KERNEL = {"_embedding_bag_per_sample_weights_backward": (torch.bfloat16,)}
"""Functions that a GPU has not for all types that a CPU has them for."""

INDEXING = ("__getitem__", "__setitem__", "index_put", "index_put_")
MAKING = ("tensor", "as_tensor", "new_tensor", "asarray")
MASKS = (torch.bool, torch.uint8)


class Card(torch.Tensor):
    """A tensor in the memory of a pretended GPU, of the number `index`."""

    index = 0
    device = property(lambda self: torch.device("cuda", self.index))  # type: ignore[assignment]
    get_device = property(lambda self: lambda: self.index)  # type: ignore[assignment]
    is_cuda = property(lambda _self: True)  # type: ignore[assignment]
    is_cpu = property(lambda _self: False)  # type: ignore[assignment]
    gpu: ClassVar[Pretend | None] = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if cls.gpu is None:
            return super().__torch_function__(func, types, args, kwargs)
        return cls.gpu.__torch_function__(func, types, args, kwargs)  # of a thread that the mode is not on in


class Pretend(TorchFunctionMode):
    """So many GPUs of this compute capability and memory, within the block.

    Attributes:
        waits, uploads, hops: (function of torch, "file.py:line") -> how often; a hop is a copy between two GPUs.
        held, peaks: of each GPU, bytes of its `Card`s, now and at most.
        reserved: of each GPU, bytes that stay taken when tensors are gone, for those to come.
        limits: of GPUs on which this process may have less than all bytes.
        timeline: of the streams of all of them.
    """

    device = DEVICE

    def __init__(self, capability: tuple[int, int] = (8, 0), total: int = 32 << 30, count: int = 1) -> None:
        super().__init__()
        self.capability, self.total, self.count = capability, total, count
        self.held, self.reserved, self._holders = Counter[int](), Counter[int](), Counter[int]()
        self.timeline = Timeline(lambda what: self._count(self.waits, what), caller)
        self.limits = {}
        self._pinned = {}
        self.reset()

    def __enter__(self) -> Pretend:
        Card.gpu = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        Card.gpu = None
        self.timeline.settle()
        super().__exit__(*error)

    @property
    def live(self) -> int:
        """Bytes of all `Card`s."""
        return self.held.total()

    @property
    def peak(self) -> int:
        """The most bytes of each GPU, added up."""
        return self.peaks.total()

    def reset(self) -> None:
        """Counts begin anew."""
        self.waits, self.uploads = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        self.hops, self.peaks = Counter[tuple[str, str]](), Counter(self.held)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have `torch.cuda` tell of these GPUs."""
        facts = {
            "is_available": lambda: True,
            "device_count": lambda: self.count,
            "current_device": lambda: 0,
            "get_device_capability": lambda _device=None: self.capability,
            "get_device_name": lambda _device=None: "pretended GPU",
            "get_arch_list": lambda: [f"sm_{self.capability[0]}{self.capability[1]}"],
            "mem_get_info": lambda device=None: (self.total - self.reserved[number(device)], self.total),
            "memory_reserved": lambda device=None: self.reserved[number(device)],
            "memory_allocated": lambda device=None: self.held[number(device)],
            "max_memory_allocated": lambda device=None: self.peaks[number(device)],
            "get_device_properties": lambda _device=None: SimpleNamespace(total_memory=self.total),
            "is_bf16_supported": lambda including_emulation=True: (
                including_emulation or self.capability >= (8, 0)
            ),
            "set_per_process_memory_fraction": self._limit,
            "is_current_stream_capturing": lambda: False,
            "synchronize": lambda _device=None: self.timeline.current.synchronize(),
            "Stream": self.timeline.kind,
            "Event": Event,
            "current_stream": lambda _device=None: self.timeline.current,
            "stream": self.timeline.within,
        }
        for name, fact in facts.items():
            monkeypatch.setattr(torch.cuda, name, fact)
        # On opening transformers takes memory ahead, of at least 1.2 GiB, and reads in threads that know no `Pretend`.
        monkeypatch.setattr("transformers.modeling_utils.caching_allocator_warmup", lambda *_: None)
        monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor))

    def _limit(self, fraction: float, device: torch.device | int | None = None) -> None:
        self.limits[number(device)] = int(fraction * self.total)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.clone()
        self._pinned[storage_of(pinned)] = pinned  # kept, so that no other memory is taken for it
        return pinned

    def __torch_function__(
        self, func: Callable[..., Any], _types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__ if func.__name__ != "__get__" else ""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        cards = [leaf for leaf in leaves if isinstance(leaf, Card)]
        with torch._C.DisableTorchFunctionSubclass():
            if name == "_has_compatible_shallow_copy_type":  # whether a parameter keeps its object
                return place(args[0]) == place(args[1])
            if name == "to":
                return self._moved(args, kwargs)
            if name in ("cpu", "cuda", "numpy") and isinstance(args[0], torch.Tensor):
                if name == "numpy" and cards:
                    raise TypeError(
                        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first."
                    )
                if name == "numpy":
                    return func(*args, **kwargs)
                return self._copied(args[0], number(*args[1:2]) if name == "cuda" else None, place(args[0]))
            asked = kwargs.get("device")
            asked = None if asked is None else torch.device(asked)
            on_card = number(cards[0].device) if cards and asked is None else None
            if asked is not None and asked.type == "cuda":
                kwargs["device"], on_card = CPU, self._existing(asked)
            if name == "copy_" and place(args[0]) != place(args[1]):
                self._count_copy(name, place(args[1]), place(args[0]))
                self._sends(args[0], args[1], kwargs.get("non_blocking", False))
            elif cards and name != "__set__":  # an attribute's, as of `Parameter.data`
                self._check(func, name, args, leaves)
            is_made = name in MAKING and on_card is not None
            if is_made and not (cards and asked is None and name != "new_tensor"):
                self._count(self.uploads, name)
            if cards:
                if cards[0].dtype in NO_KERNEL.get(name, ()):
                    raise NotImplementedError(f'"{name}_cuda" not implemented for {cards[0].dtype}')
                self._look(name, args, kwargs)
            if name == "histc":  # a CPU counts floating-point numbers alone
                args = (args[0].float(), *args[1:])
            made = func(*args, **kwargs)
            self._touch(name, cards, made)
            if on_card is None:
                return made
            return tree_map(
                lambda leaf: self._card(leaf, on_card) if isinstance(leaf, torch.Tensor) else leaf, made
            )

    def _sends(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        """`Tensor.copy_` from the host, without a wait where the memory is pinned."""
        if place(source) is None and non_blocking and storage_of(source) in self._pinned:
            self.timeline.touch([storage_of(target)])
            self.timeline.sends(source)
        else:
            self.timeline.current.finish(self.timeline.current.clock)

    def _touch(self, name: str, cards: list[torch.Tensor], made: Any) -> None:
        """A kernel on this memory; a view is none, nor is a question."""
        used = {storage_of(card) for card in cards}
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        views = any(storage_of(one) in used for one in results)
        if used and (changes or (results and not views)):
            self.timeline.touch(used)

    def _look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count what the call waits for."""
        if name in INDEXING:
            indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor)]
            masks = sum(index.dtype in MASKS and index.dim() > 0 for index in indices)
            filled = name != "__getitem__" and not (isinstance(args[2], torch.Tensor) and args[2].numel() > 1)
            if masks and not filled:
                self._count(self.waits, f"{name} by a mask", masks)
            if any(not isinstance(index, Card) for index in indices):
                self._count(self.uploads, f"{name} by what the host has")
            scalars = [index for index in indices if index.dim() == 0 and index.dtype not in MASKS]
            if scalars:  # read, as if they were numbers
                self._count(self.waits, f"{name} by a scalar", len(scalars))
        elif name == "where" and len(args) == 1:
            self._count(self.waits, name)
        elif name in WAITING and not (name == "repeat_interleave" and self._sized(args, kwargs)):
            self._count(self.waits, name, WAITING[name])

    @staticmethod
    def _sized(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the size of what is repeated is known without a look."""
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
        return kwargs.get("output_size") is not None or isinstance(repeats, int)

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """`Tensor.to`."""
        tensor, rest = args[0], args[1:]
        if (other := rest[0] if rest else kwargs.get("other")) is not None and isinstance(
            other, torch.Tensor
        ):
            return self._copied(tensor.to(other.dtype), place(other), place(tensor))
        device, dtype, _, _ = torch._C._nn._parse_to(
            *rest, **{k: v for k, v in kwargs.items() if k != "copy"}
        )
        was = place(tensor)
        cast = tensor if dtype is None else tensor.to(dtype)
        cast = cast.clone() if kwargs.get("copy") and cast is tensor else cast
        to = None if device is None or device.type != "cuda" else self._existing(device)
        return self._copied(cast, was if device is None else to, was)

    def _existing(self, device: torch.device) -> int:
        """The number of this GPU.

        Raises:
            RuntimeError: there are not so many.
        """
        if number(device) >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return number(device)

    def _copied(self, tensor: torch.Tensor, to: int | None, was: int | None) -> torch.Tensor:
        """`tensor` on the GPU of this number, None: on the host; as it is where it `was` there."""
        if was == to:
            return tensor if to is None else self._card(tensor, to)
        self._count_copy("to the host" if to is None else "to the device", was, to)
        copy = tensor.clone().as_subclass(torch.Tensor)
        return copy if to is None else self._card(copy, to)

    def _count_copy(self, what: str, source: int | None, target: int | None) -> None:
        counter = self.uploads if source is None else self.waits if target is None else self.hops
        self._count(counter, what)

    def _card(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """`tensor` as a `Card` of this GPU, its storage counted until nobody holds it."""
        if isinstance(tensor, Card):
            return tensor
        card = tensor.as_subclass(Card)
        card.index = index
        storage = card.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self._holders[key] += 1
        if self._holders[key] == 1:
            self.held[index] += size
            self.timeline.took(key)
            if self.held[index] > self.limits.get(index, self.total):
                self.held[index] -= size
                del self._holders[key]
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
            for most in (self.peaks, self.reserved):
                most[index] = max(most[index], self.held[index])
        weakref.finalize(card, self._let_go, key, size, index)
        return card

    def _let_go(self, key: int, size: int, index: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.held[index] -= size

    def _check(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], leaves: list[Any]) -> None:
        """Refuse what a GPU refuses: tensors of another GPU, and on the host all but scalars and indices."""
        if torch._C._current_graph_task_id() != -1:  # gradients lose their class
            return
        indices = {id(leaf) for leaf in tree_leaves(args[1])} if name in INDEXING else set()
        first = next(place(leaf) for leaf in leaves if isinstance(leaf, Card))
        for leaf in leaves:
            on_host = not isinstance(leaf, Card) and (leaf.dim() == 0 or id(leaf) in indices)
            if place(leaf) != first and not on_host:
                other = "cpu" if place(leaf) is None else f"cuda:{place(leaf)}"
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:{first} and {other}! ({resolve_name(func) or name})"
                )

    def _count(self, counter: Counter[tuple[str, str]], what: str, times: int = 1) -> None:
        counter[what, caller()] += times
        if counter is self.waits:
            self.timeline.current.done = self.timeline.current.clock


def storage_of(tensor: torch.Tensor) -> int:
    """An id of the memory of a tensor."""
    return tensor.untyped_storage()._cdata


def number(device: torch.device | str | int | None = None) -> int:
    """Which GPU is meant: the first, where none is named."""
    index = device if isinstance(device, int) else device and torch.device(device).index
    return int(index or 0)


def place(tensor: torch.Tensor) -> int | None:
    """The number of the GPU that a tensor is on; None: the host."""
    return tensor.index if isinstance(tensor, Card) else None


def caller() -> str:
    """The nearest line of prunecli, else of transformers, else of anything."""
    found = list(frames())
    for package in ("/prunecli/", "/transformers/", ""):
        for path, line in found:
            if package in path:
                return f"{PurePath(path).name}:{line}"
    return "?"


def frames() -> Iterator[tuple[str, int]]:
    """Files and lines, the innermost first, without this one and torch's."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path != __file__ and "/torch/" not in path:
            yield path, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
