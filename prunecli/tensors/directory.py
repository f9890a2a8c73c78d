"""The files of a checkpoint directory: config, index and weight files, whose tensors are found without their values."""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from prunecli.architectures import OLDER_TYPES
from prunecli.errors import CheckpointError, UsageError, reason_of
from prunecli.private import fake_tensors
from prunecli.tensors.dtypes import is_known, parse_dtype
from prunecli.tensors.hub.names import no_such_directory
from prunecli.tensors.json_files import DEEPEST, is_finite, parsed, read_object, refuse_pointer
from prunecli.tensors.reader import Stored, TensorInfo, WeightFile
from prunecli.tensors.side_files import MODULES_FILE, folders_of, module_folder, of_directory, of_file

if TYPE_CHECKING:
    import torch

WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")
"""In the order in which transformers looks for them; each may also be sharded under NAME.index.json."""

UNLIMITED = ("time_step_limit", "mamba_dt_limit")
"""Keys of config.json under which published models, Nemotron-H for one, have `Infinity`, as Python writes it."""


def read_config(directory: Path) -> dict[str, Any]:
    """config.json, its model type as it is called now.

    Raises:
        CheckpointError: no such directory, or no readable config.json in it.
    """
    if not directory.exists():
        raise no_such_directory(directory)
    if not directory.is_dir():
        what, remedy = of_file(directory)
        raise CheckpointError(f"{directory}: {what}", remedy)
    path = directory / "config.json"
    if not path.is_file():
        raise _elsewhere(directory) or CheckpointError(
            f"{directory}: not a checkpoint (it holds no config.json)",
            "Give the directory that holds config.json.",
        )
    config = read_object(path)
    if not is_finite(config, UNLIMITED):
        raise CheckpointError(
            f"{path}: holds NaN or infinity, which are no values of JSON, or more than {DEEPEST} levels",
            "Correct the value.",
        )
    if str(weights := config.get("transformers_weights")).endswith((".safetensors", ".index.json")):
        raise CheckpointError(
            f"{path}: transformers_weights names {weights}",
            "Call the file model.safetensors, an index model.safetensors.index.json, and leave the key out.",
        )
    older = config.get("model_type")
    if isinstance(older, str) and older in OLDER_TYPES:
        config["model_type"] = OLDER_TYPES[older]
    return config


def find_weights(
    directory: Path, elsewhere: Mapping[str, WeightFile] = MappingProxyType({})
) -> tuple[WeightFile, ...]:
    """The described weight files, in the order of their names in the index.

    Args:
        directory: of a checkpoint.
        elsewhere: files of it that do not lie there, by name, as they are described already.

    Raises:
        CheckpointError: there are none, one is missing or damaged, or the index names what is not there.
    """
    for name in WEIGHT_NAMES:
        if name in elsewhere:
            return (elsewhere[name],)
        if (directory / name).is_file():
            return (_describe(directory / name),)
        index = directory / f"{name}.index.json"
        if index.is_file():
            return _sharded(directory, index, elsewhere)
    raise _elsewhere(directory) or CheckpointError(
        f"{directory}: holds no weights ({' or '.join(WEIGHT_NAMES)}, or an index of shards)",
        "Download or copy the weight files into it.",
    )


def _elsewhere(directory: Path) -> CheckpointError | None:
    """Describe a directory whose model has another format, or lies in a folder that modules.json names."""
    for folder in folders_of(directory):
        config = directory / folder / "config.json"
        if config.is_file() and "model_type" in read_object(config):
            return CheckpointError(
                f"{directory}: not a checkpoint (the transformer lies in {folder}, as {MODULES_FILE} says)",
                f"Give {directory / folder}; its result takes the place of {folder} in a copy of the directory.",
            )
    found = of_directory(directory)
    return None if found is None else CheckpointError(f"{directory}: {found[0]}", found[1])


def _describe(path: Path) -> WeightFile:
    if path.suffix == ".safetensors":
        return read_header(path)
    return read_pickled(path)


def _sharded(directory: Path, index: Path, elsewhere: Mapping[str, WeightFile]) -> tuple[WeightFile, ...]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or {*map(type, weight_map.values())} != {str}:
        raise CheckpointError(f"{index}: holds no weight_map from tensors to files", "Download it again.")
    shards = {shard: directory / shard for shard in sorted(set(weight_map.values()))}
    odd = next((text for text in (*weight_map, *shards) if not text.isprintable()), None)
    if odd is not None:
        raise CheckpointError(
            f"{index}: damaged: {odd!r} is no name of a tensor or file", "Download it again."
        )
    for shard in shards:
        if not module_folder(shard):
            raise CheckpointError(
                f'{index}: names a file outside of its directory: "{shard}"', "Download it again."
            )
    missing = [shard for shard, path in shards.items() if shard not in elsewhere and not os.path.isfile(path)]  # noqa: PTH113 (a name that no file system takes)
    if missing:
        raise CheckpointError(
            f"{directory / missing[0]}: missing ({len(missing)} of {len(shards)} files in {index.name})",
            "Download or copy the missing files.",
        )
    files = {shard: elsewhere.get(shard) or _describe(path) for shard, path in shards.items()}
    absent = [name for name, shard in weight_map.items() if name not in files[shard].tensors]
    if absent:
        raise CheckpointError(
            f"{index}: {absent[0]} is not in {weight_map[absent[0]]} ({len(absent)} such tensors)",
            "Index and shards are not of one download; download them again.",
        )
    return (*files.values(),)


MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library: a longer header is damage."""


def read_header(path: Path) -> WeightFile:
    """The tensors of a .safetensors file, in the order of their bytes; reads the header only.

    Raises:
        CheckpointError: the file is missing, truncated, or its header is not a valid one.
    """
    refuse_pointer(path)
    with path.open("rb") as file:
        return described(
            path, os.fstat(file.fileno()).st_size, lambda start, count: os.pread(file.fileno(), count, start)
        )


def described(path: Path, size: int, read: Callable[[int, int], bytes]) -> WeightFile:
    """The tensors of a .safetensors file, in the order of their bytes.

    Args:
        path: the file, for messages and as that of the result.
        size: its bytes.
        read: gives the bytes from a start on, so many of them; it is asked for those of the header.

    Raises:
        CheckpointError: the file is truncated, or its header is not a valid one.
    """
    header = read(0, 8)
    if len(header) < 8:
        raise _damaged(path, f"truncated ({size} bytes)")
    (length,) = struct.unpack("<Q", header)
    if length > MAX_HEADER_BYTES:
        raise _damaged(path, f"damaged: its header would be {length:,} bytes long")
    if 8 + length > size:
        raise _damaged(path, f"truncated ({size:,} bytes, its header alone ends at {8 + length:,})")
    tensors = {}
    position, previous = 0, "the header"
    try:
        content = parsed(read(8, length), unique=True)
        content.pop("__metadata__", None)
        entries = sorted((entry["data_offsets"], name, entry) for name, entry in content.items())
        for (begin, end), name, entry in entries:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            is_sized = {*map(type, (begin, end, *shape))} == {int} and min((begin, *shape)) >= 0
            if type(dtype) is not str or not is_sized:
                raise ValueError(f"the entry of {name!r}")
            if not name.isprintable():
                raise _damaged(path, f"damaged: {name!r} is no name of a tensor")
            if not is_known(dtype):
                raise CheckpointError(
                    f"{path}: {name} has the type {dtype!r}, which prunecli does not read",
                    "Convert the checkpoint to float32, float16 or bfloat16 first.",
                )
            info = TensorInfo(name, dtype, shape)
            if end - begin != info.nbytes:
                what = f"its shape {list(shape)} in {dtype} needs {info.nbytes:,}"
                raise _damaged(path, f"damaged: {name} has {end - begin:,} bytes, {what}")
            if 8 + length + end > size:
                raise _damaged(path, f"truncated ({size:,} bytes, {name} ends at {8 + length + end:,})")
            if begin != position:
                raise _damaged(path, f"damaged: {name} overlaps {previous}, or unused bytes lie between them")
            tensors[name] = Stored(info, 8 + length + begin)
            position, previous = end, name
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _damaged(
            path, f"damaged: its header is not of the safetensors form ({reason_of(error)})"
        ) from error
    if 8 + length + position != size:
        raise _damaged(path, f"damaged: {size - 8 - length - position:,} bytes after the last tensor")
    return WeightFile(path, tensors)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", "Download or copy the file again.")


ZIP_MAGIC = b"PK\x03\x04"
OFFSET = "_checkpoint_offset"
"""Attribute of a storage without values: the first byte of its values in the file."""


def read_pickled(path: Path) -> WeightFile:
    """The tensors of a .bin file, in its order.

    Contiguous tensors and contiguous views are read from the file itself, later and piece by piece. Others
    (transposed, expanded) are written row-major into an unnamed temporary file now, one at a time. So are all
    tensors of the format before torch 1.6, which is no zip file: there the whole file passes through memory.

    Raises:
        CheckpointError: the file is missing, truncated, or holds more than tensors.
    """
    refuse_pointer(path)
    with path.open("rb") as file:
        magic = file.read(len(ZIP_MAGIC))
    if magic != ZIP_MAGIC:
        return _spooled(path, _load(path), {})
    described = _load(path, describe=True)
    in_place = {
        name: stored for name, tensor in described.items() if (stored := _in_place(path, name, tensor))
    }
    if len(in_place) == len(described):
        return WeightFile(path, in_place)
    return _spooled(path, _load(path, mmap=True), in_place)


def _load(path: Path, *, describe: bool = False, mmap: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; with `describe`, only their places: storages that know their offsets."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if describe:
                loaded = _described(path)
            else:
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: not a plain file of tensors (torch.load with weights_only=True refuses it)",
            "Files that would run code are not opened; use a .safetensors copy of the checkpoint.",
        ) from error
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise _damaged(path, f"truncated or damaged ({reason_of(error)})") from error
    if not isinstance(loaded, dict) or not loaded:
        raise CheckpointError(f"{path}: holds no named tensors but a {type(loaded).__name__}")
    for name, value in loaded.items():
        is_name = isinstance(name, str) and name.isprintable()
        if not is_name or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise CheckpointError(
                f"{path}: the entry {name!r} is no dense tensor but a {type(value).__name__}",
                "Weight files hold a flat mapping from names to tensors; a training checkpoint is not one.",
            )
    return cast("dict[str, torch.Tensor]", loaded)


def _described(path: Path) -> Any:
    import torch

    with zipfile.ZipFile(path) as archive:
        orders = [archive.read(name) for name in archive.namelist() if name.endswith("/byteorder")]
    if b"big" in orders:
        raise CheckpointError(f"{path}: big-endian values", "Save the checkpoint again on a common machine.")
    loaded = torch.load(path, map_location="meta", weights_only=True)
    values = loaded.values() if isinstance(loaded, dict) else ()
    dense = [one for one in values if isinstance(one, torch.Tensor) and one.layout == torch.strided]
    if all(hasattr(tensor.untyped_storage(), OFFSET) for tensor in dense):
        return loaded
    with fake_tensors():  # an older torch tells offsets here only; slow
        return torch.load(path, map_location="cpu", weights_only=True)


def _info(path: Path, name: str, tensor: torch.Tensor) -> TensorInfo:
    try:
        return TensorInfo(name, parse_dtype(str(tensor.dtype)), tuple(tensor.shape))
    except UsageError:
        raise CheckpointError(
            f"{path}: {name} has the type {tensor.dtype}, which prunecli does not read"
        ) from None


def _in_place(path: Path, name: str, tensor: torch.Tensor) -> Stored | None:
    """Return the place of a described tensor's values in the zip file; None if they are no plain run of bytes."""
    info = _info(path, name, tensor)
    storage = tensor.untyped_storage()
    start = getattr(storage, OFFSET, None)
    if start is None or not tensor.is_contiguous():
        return None
    shift = int(tensor.storage_offset()) * tensor.element_size()
    end = start + shift + info.nbytes
    if end > path.stat().st_size or (info.nbytes and shift + info.nbytes > storage.nbytes()):
        raise _damaged(path, f"truncated ({name} ends at {end:,})")
    return Stored(info, start + shift)


def _spooled(path: Path, tensors: dict[str, torch.Tensor], in_place: dict[str, Stored]) -> WeightFile:
    """All tensors of the file; those that are not `in_place` are copied into an unnamed temporary file."""
    import torch

    spool = cast("BinaryIO", tempfile.TemporaryFile(prefix="prunecli-"))  # noqa: SIM115 (the checkpoint closes it)
    stored = {}
    for name in list(tensors):
        tensor = tensors.pop(name)
        if name in in_place:
            stored[name] = in_place[name]
            continue
        stored[name] = Stored(_info(path, name, tensor), spool.tell(), spooled=True)
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel():
            spool.write(flat.view(torch.uint8).numpy().data)
    spool.flush()
    return WeightFile(path, stored, spool)
