"""The files of a checkpoint directory: config, and weight files with their index."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from prunecli.architectures import FAMILIES, OLDER_TYPES, REDUCED_PREFIX
from prunecli.errors import CheckpointError
from prunecli.tensors.hub.names import no_such_directory
from prunecli.tensors.json_files import DEEPEST, is_deep, is_finite, read_object
from prunecli.tensors.reader import WeightFile
from prunecli.tensors.side_files import MODULES_FILE, folders_of, of_directory, of_file
from prunecli.tensors.weight_files import read_header, read_pickled

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
    if is_deep(config):
        raise CheckpointError(
            f"{path}: nested more than {DEEPEST} levels deep", "Download or copy the file again."
        )
    if not is_finite(config, UNLIMITED):
        raise CheckpointError(
            f"{path}: holds NaN or infinity, which are no values of JSON", "Correct the value."
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
    remedy = ""
    if (directory / "config.json").is_file():
        model_type = str(read_config(directory).get("model_type")).removeprefix(REDUCED_PREFIX)
        if model_type in FAMILIES:  # then a config.json is all that training from random weights needs
            command = f"prunecli finetune --from-scratch {shlex.quote(str(directory))}"
            remedy = f", or train it from random ones: {command}"
    raise _elsewhere(directory) or CheckpointError(
        f"{directory}: holds no weights ({' or '.join(WEIGHT_NAMES)}, or an index of shards)",
        f"Download or copy the weight files into it{remedy}.",
    )


def _elsewhere(directory: Path) -> CheckpointError | None:
    """What to say of a sentence-transformers model whose transformer has a folder of its own, or of another format."""
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
    if not "".join((*weight_map, *shards)).isprintable():
        odd = next(text for entry in weight_map.items() for text in entry if not text.isprintable())
        raise CheckpointError(
            f"{index}: damaged: {odd!r} is no name of a tensor or file", "Download it again."
        )
    for shard, path in shards.items():
        parts = PurePosixPath(shard.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise CheckpointError(
                f'{index}: names a file outside of its directory: "{shard}"', "Download it again."
            )
        if path.suffix not in (".safetensors", ".bin"):
            raise CheckpointError(f'{index}: "{shard}" is no weight file', "Download it again.")
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
    if sum(len(file.tensors) for file in files.values()) == len(weight_map):
        return (*files.values(),)
    # Without tensors that the index assigns to another file.
    return tuple(
        WeightFile(
            file.path,
            {name: held for name, held in file.tensors.items() if weight_map.get(name, shard) == shard},
            file.spool,
        )
        for shard, file in files.items()
    )
