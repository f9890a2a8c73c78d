"""Which files of a hub model make the checkpoint: one format of the weights, and what travels along."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from prunecli.errors import CheckpointError
from prunecli.tensors.belonging import MODULES_FILE, WEIGHTS, belonging, module_folders
from prunecli.tensors.directory import WEIGHT_NAMES


def needed_files(held: Mapping[str, int], read: Callable[[str], Any]) -> tuple[str, ...]:
    """The files to fetch, those beside the weights first: what would travel along from a directory of the same files.

    Args:
        held: path -> bytes, of every file of the model.
        read: gives the JSON of one of them.

    Raises:
        CheckpointError: there are no weights that prunecli reads, or the index names others than there are.
    """
    modules = module_folders(read(MODULES_FILE)) if MODULES_FILE in held else ()
    weights = weight_files(held, read)
    beside, _ = belonging({name: size for name, size in held.items() if name not in weights}, modules)
    return (*beside, *weights)


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
    others = sorted(name for name in held if name.endswith(WEIGHTS))
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
