"""Which files of a hub model make the checkpoint: one format of the weights, and what travels along."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from prunecli.errors import CheckpointError
from prunecli.tensors.directory import WEIGHT_NAMES

MODULES_FILE = "modules.json"
"""Of sentence-transformers: its modules, each with the folder (`path`) that it is stored in."""

TEMPLATES = "additional_chat_templates"
"""The one folder that tokenizers of transformers read."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_NOT_NEEDED = (
    *(".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ggml", ".ot", ".tflite", ".pdparams", ".mlmodel"),
    *(".zip", ".tar", ".gz", ".tgz", ".npz", ".parquet", ".arrow", ".ipynb", ".pdf"),
    *(".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".mp4", ".wav", ".mp3"),
    ".index.json",
)
"""Other formats of the weights, data and pictures."""


def needed_files(held: Collection[str], read: Callable[[str], Any]) -> tuple[str, ...]:
    """The files to fetch, small ones first.

    Args:
        held: every file of the model, by its path.
        read: gives the JSON of one of them.

    Raises:
        CheckpointError: there are no weights that prunecli reads, or the index names others than there are.
    """
    return (*_side_files(held), *_module_files(held, read), *weight_files(held, read))


def weight_files(held: Collection[str], read: Callable[[str], Any]) -> tuple[str, ...]:
    """The weights, their index first; .safetensors where there are any.

    Raises:
        CheckpointError: as `needed_files`.
    """
    for name in WEIGHT_NAMES:
        index = f"{name}.index.json"
        if name in held:
            return (name,)
        if index in held:
            shards = _shards(read(index))
            if missing := [shard for shard in shards if shard not in held]:
                raise CheckpointError(f"its {index} names {missing[0]}, which it does not hold")
            return (index, *shards)
    others = sorted(name for name in held if name.endswith((*_WEIGHTS, *_NOT_NEEDED[:8])))
    instead = f"; it has {others[0]}" if others else ""
    raise CheckpointError(f"it holds no weights that prunecli reads ({' or '.join(WEIGHT_NAMES)}{instead})")


def missing_weights(directory: Path, read: Callable[[str], Any]) -> list[str]:
    """The weight files that a snapshot in the cache lacks, as far as it can be known there."""
    for name in WEIGHT_NAMES:
        if (directory / name).is_file():
            return []
        if (directory / f"{name}.index.json").is_file():
            shards = _shards(read(f"{name}.index.json"))
            return [shard for shard in shards if not (directory / shard).is_file()]
    return [WEIGHT_NAMES[0]]


def _shards(index: Any) -> tuple[str, ...]:
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    # What is wrong with an index is said when the directory is opened.
    named = weight_map.values() if isinstance(weight_map, dict) else ()
    return tuple(sorted({shard for shard in named if isinstance(shard, str)}))


def _side_files(held: Collection[str]) -> Iterator[str]:
    for name in sorted(held):
        folder, _, file = name.rpartition("/")
        if (
            folder in ("", TEMPLATES)
            and not file.startswith(".")
            and not file.endswith((*_WEIGHTS, *_NOT_NEEDED))
        ):
            yield name


def _module_files(held: Collection[str], read: Callable[[str], Any]) -> Iterator[str]:
    """Of each folder that modules.json names all but the other formats of its weights."""
    modules = read(MODULES_FILE) if MODULES_FILE in held else []
    named = [module.get("path") for module in modules if isinstance(module, dict)]
    folders = [PurePosixPath(path) for path in named if isinstance(path, str) and path]
    for name in sorted(held):
        path = PurePosixPath(name)
        if not any(folder in path.parents for folder in folders) or path.name.endswith(_NOT_NEEDED):
            continue
        if path.name != "pytorch_model.bin" or str(path.with_name("model.safetensors")) not in held:
            yield name
