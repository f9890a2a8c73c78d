"""Which files belong to a model, by their names: for a directory and for a listing of the hub alike."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any

MODULES_FILE = "modules.json"
"""Of sentence-transformers: its modules in order, each with the folder (`path`) that it is stored in."""

LARGEST_FOLDER_BYTES = 64 << 20
"""A folder that nothing names and that holds more is data, not a part of the model."""

_TORCH_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_OTHER_WEIGHTS = (
    *(
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
    ),
    *(".ot", ".pdparams", ".tflite"),
)
WEIGHTS = (*_TORCH_WEIGHTS, *_OTHER_WEIGHTS)
_DATA = (
    *(".arrow", ".gz", ".npz", ".parquet", ".tar", ".tgz", ".zip"),
    *(".ipynb", ".mp3", ".mp4", ".pdf", ".wav"),
)
_INDICES = tuple(f"{ending}.index.json" for ending in WEIGHTS)
_OF_AN_ADAPTER = "adapter_config.json"  # whose weights fit the original; transformers would look for them
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


def belonging(sizes: Mapping[str, int], modules: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """What belongs to a model beside its weights, and what does not: each sorted.

    Files belong to it but for weights, their indices, adapters and data. A folder belongs to it where modules.json
    names it, with one format of the weights of its module; any other one where it holds no weights, nothing of a
    training and no mass of data (`additional_chat_templates`, the figures of README.md). Hidden files and folders, and
    indices, are in neither list.

    Args:
        sizes: path below the model's directory, with `/` -> bytes; the weights that are used need not be there.
        modules: the folders of `module_folders`.

    Returns:
        Paths of files, and paths of what is left out: a folder, all of which is, with a slash at its end.
    """
    kept: list[str] = []
    left: list[str] = []
    named = {PurePosixPath(folder).parts[0] for folder in modules}
    visible = sorted(name for name in sizes if not any(part.startswith(".") for part in name.split("/")))
    for top, group in groupby(visible, key=lambda name: name.split("/")[0]):
        names = list(group)
        if names == [top]:
            if not top.endswith(_INDICES):
                (left if top.endswith((*WEIGHTS, *_DATA)) or top == _OF_AN_ADAPTER else kept).append(top)
        elif top in named:
            reasons = {name: _left_of_module(name, names) for name in names}
            kept += [name for name, reason in reasons.items() if reason is None]
            left += dict.fromkeys(reason for reason in reasons.values() if reason is not None)
        elif _is_part(top, names, sum(sizes[name] for name in names)):
            kept += names
        else:
            left.append(f"{top}/")
    return kept, left


def module_folders(modules: Any) -> tuple[str, ...]:
    """The folders that the content of modules.json names, but for `""` and what lies outside of the directory."""
    return tuple(_inside(modules if isinstance(modules, list) else []))


def _inside(modules: list[Any]) -> Iterator[str]:
    for module in modules:
        path = module.get("path") if isinstance(module, dict) else None
        place = PurePosixPath(path.replace("\\", "/") if isinstance(path, str) else "")
        if place.parts and not place.is_absolute() and ".." not in place.parts:
            yield str(place)


def _left_of_module(name: str, beside: Collection[str]) -> str | None:
    """The file, or the folder that it lies in, if it is another format of the weights of a module."""
    parts = name.split("/")
    for depth, part in enumerate(parts[1:-1], 2):
        if part.lower() in _OTHER_FORMAT_FOLDERS:
            return "/".join(parts[:depth]) + "/"
    is_second = parts[-1] == "pytorch_model.bin" and "/".join([*parts[:-1], "model.safetensors"]) in beside
    return name if is_second or name.endswith((*_OTHER_WEIGHTS, *_DATA)) else None


def _is_part(folder: str, names: Collection[str], nbytes: int) -> bool:
    return (
        folder.lower() not in _OTHER_FORMAT_FOLDERS
        and not _OF_TRAINING.fullmatch(folder)
        and nbytes <= LARGEST_FOLDER_BYTES
        and not any(name.endswith((*WEIGHTS, *_DATA)) for name in names)
    )
