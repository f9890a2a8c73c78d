"""What travels along when tensors are rewritten (tokenizer, templates, code, modules), and what is left out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MODULES_FILE = "modules.json"
"""Of sentence-transformers: its modules in order, each with the folder (`path`) that it is stored in."""

LARGEST_FOLDER_BYTES = 64 << 20
"""A folder that nothing names and that holds more is data, not a part of the model."""

_REWRITTEN = {"config.json", "README.md"}
_OF_AN_ADAPTER = {"adapter_config.json"}  # whose weights fit the original; transformers would look for them
_MODULE_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_OTHER_FORMATS = (
    ".engine",
    ".ggml",
    ".gguf",
    ".h5",
    ".mlmodel",
    ".mnn",
    ".msgpack",
    ".onnx",
    ".onnx.data",
    ".onnx_data",
    ".ot",
    ".pdparams",
    ".tflite",
)
_WEIGHTS = (*_MODULE_WEIGHTS, *_OTHER_FORMATS)
_INDICES = tuple(f"{ending}.index.json" for ending in _WEIGHTS)
_OTHER_FORMAT_FOLDERS = {
    "coreml",
    "gguf",
    "metal",
    "mlx",
    "onnx",
    "openvino",
    "original",
    "tensorrt",
    "tflite",
}
_OF_TRAINING = re.compile(
    r"(checkpoint-|global_step)\d+|runs|logs?|wandb|mlruns|lightning_logs|__pycache__|.*\.training"
)
_SHARD = re.compile(r"-\d+-of-(\d+)")


@dataclass(frozen=True)
class SideFiles:
    """The entries of a checkpoint directory beside its weights, config.json and README.md.

    Attributes:
        carried: files that belong to the model, in the order of their names.
        left_out: what does not: other formats of the weights, state of a training, data, broken links; relative to
            the directory, a folder with a slash at its end. Hidden files and folders are not named.
    """

    carried: tuple[Path, ...]
    left_out: tuple[str, ...]


def side_files(directory: Path, weights: Collection[Path]) -> SideFiles:
    """Sort what lies beside the weights.

    Files belong to the model but for weights. A folder belongs to it where modules.json names it, with the weights
    of its module; any other one where it holds no weights, nothing of a training and no mass of data
    (`additional_chat_templates`, the figures of README.md). Links to files are followed, as the snapshots of the hub's
    cache are made of them; links to folders where modules.json names them.

    Args:
        weights: the files whose tensors are rewritten.
    """
    carried: list[Path] = []
    left_out: list[Path] = []
    modules = {PurePosixPath(folder).parts[0] for folder in module_folders(directory)}
    passed = {*weights, *(folder for file in weights for folder in file.parents)}
    for path in _entries(directory):
        if path in passed or path.name in _REWRITTEN or path.name.endswith(_INDICES):
            continue
        if path.is_dir():
            is_module = path.name in modules and not directory.resolve().is_relative_to(path.resolve())
            kept, left = _module(path) if is_module else _folder(path)
            carried += kept
            left_out += left
        elif path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in _OF_AN_ADAPTER:
            carried.append(path)
        else:
            left_out.append(path)
    return SideFiles(tuple(sorted(carried)), tuple(_relative(path, directory) for path in left_out))


def module_folders(directory: Path) -> tuple[str, ...]:
    """The folders that modules.json names, but for the directory itself (`""`) and what lies outside of it."""
    try:
        modules = json.loads((directory / MODULES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ()
    if not isinstance(modules, list):
        return ()
    named = [module.get("path") for module in modules if isinstance(module, dict)]
    places = [PurePosixPath(path.replace("\\", "/")) for path in named if isinstance(path, str)]
    inside = [
        place for place in places if place.parts and not place.is_absolute() and ".." not in place.parts
    ]
    return tuple(str(place) for place in inside)


def in_one_line(left_out: Sequence[str], most: int = 8) -> str:
    """`onnx/, pytorch_model-*-of-00002.bin, tf_model.h5`: shards as one name, no more than `most` names."""
    names = list(dict.fromkeys(_SHARD.sub(r"-*-of-\1", name) for name in left_out))
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def _module(folder: Path) -> tuple[list[Path], list[Path]]:
    """All of a module's folder but other formats of its weights."""
    kept: list[Path] = []
    left: list[Path] = []
    for path in _entries(folder):
        if path.is_dir() and not path.is_symlink() and path.name.lower() not in _OTHER_FORMAT_FOLDERS:
            below = _module(path)
            kept += below[0]
            left += below[1]
        elif path.is_file() and not path.name.endswith(_OTHER_FORMATS):
            kept.append(path)
        else:
            left.append(path)
    return kept, left


def _folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """All of a folder, or none of it."""
    if (
        folder.is_symlink()
        or folder.name.lower() in _OTHER_FORMAT_FOLDERS
        or _OF_TRAINING.fullmatch(folder.name)
    ):
        return [], [folder]
    kept: list[Path] = []
    nbytes = 0
    for path in _below(folder):
        nbytes += path.stat().st_size
        if path.name.endswith(_WEIGHTS) or nbytes > LARGEST_FOLDER_BYTES:
            return [], [folder]
        kept.append(path)
    return kept, []


def _below(folder: Path) -> Iterator[Path]:
    """The files in a folder and in its folders, linked ones excepted."""
    for path in _entries(folder):
        if path.is_dir() and not path.is_symlink():
            yield from _below(path)
        elif path.is_file():
            yield path


def _entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _relative(path: Path, directory: Path) -> str:
    name = path.relative_to(directory).as_posix() + ("/" if path.is_dir() else "")
    return os.fsencode(name).decode("utf-8", "replace")  # a name need not be text, and this one is printed
