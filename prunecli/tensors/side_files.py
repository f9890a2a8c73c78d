"""What a directory or a listing of the hub holds beside weights, by file names; and what it is if it is no model."""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from prunecli.tensors.json_files import lenient, read_json

MODULES_FILE = "modules.json"
"""Of sentence-transformers: its modules in order, each with the folder (`path`) that it is stored in."""

LARGEST_FOLDER_BYTES = 64 << 20
"""A folder that nothing names and that holds more is data, not a part of the model."""

_TORCH_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_OTHER_WEIGHTS = (
    ".engine", ".ggml", ".gguf", ".h5", ".mlmodel", ".mnn", ".msgpack", ".onnx", ".onnx.data", ".onnx_data", ".ot",
    ".pdparams", ".tflite",
)  # fmt: skip
WEIGHTS = (*_TORCH_WEIGHTS, *_OTHER_WEIGHTS)
_DATA = (
    ".arrow", ".gz", ".npz", ".parquet", ".tar", ".tgz", ".zip", ".ipynb", ".mp3", ".mp4", ".pdf", ".wav",
)  # fmt: skip
_INDICES = tuple(f"{ending}.index.json" for ending in WEIGHTS)
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
_REWRITTEN = ("config.json", "README.md")
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
    """Sort what lies beside the weights, by `belonging`.

    Links to files are followed, as the snapshots of the hub's cache are made of them; links to folders are not.

    Args:
        weights: the files whose tensors are rewritten.
    """
    sizes = {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in directory.rglob("*")
        if path not in weights and path.is_file()
    }
    for name in _REWRITTEN:
        sizes.pop(name, None)
    carried, left_out = belonging(sizes, folders_of(directory))
    for path in directory.iterdir():
        is_folder = path.is_dir()
        if not path.name.startswith(".") and (path.is_symlink() if is_folder else not path.is_file()):
            left_out.append(f"{path.name}/" if is_folder else path.name)
    return SideFiles(
        tuple(directory / name for name in carried),
        # A name need not be text, and this one is printed.
        tuple(os.fsencode(name).decode("utf-8", "replace") for name in sorted(left_out)),
    )


def belonging(sizes: Mapping[str, int], modules: Collection[str]) -> tuple[list[str], list[str]]:
    """Sort files into those that belong to a model beside its weights, and the others.

    Files belong to it but for weights, their indices, Mistral's own config (params.json), adapters and data. A folder
    belongs to it where modules.json names it, with one format of the weights of its module; any other one where it
    holds no weights, nothing of a training and no mass of data (`additional_chat_templates`, the figures of README.md).
    Hidden files and folders, and indices, are in neither list.

    Args:
        sizes: path below the model's directory, with `/` -> bytes; the weights that are used need not be there.
        modules: the folders of `module_folders`.

    Returns:
        Paths of files, and paths of what is left out: a folder, all of which is, with a slash at its end.
    """
    kept: list[str] = []
    others: list[str] = []
    named = {PurePosixPath(folder).parts[0] for folder in modules}
    visible = sorted(name for name in sizes if not any(part.startswith(".") for part in name.split("/")))
    for top, group in groupby(visible, key=lambda name: name.split("/")[0]):
        names = list(group)
        if names == [top]:
            if not top.endswith(_INDICES):
                is_other = top.endswith((*WEIGHTS, *_DATA)) or top in (ADAPTER, "params.json")
                (others if is_other else kept).append(top)
        elif top in named:
            left_out = {name: _other_format(name, names) for name in names}
            kept += [name for name, path in left_out.items() if path is None]
            others += dict.fromkeys(path for path in left_out.values() if path is not None)
        elif (
            top.lower() not in _OTHER_FORMAT_FOLDERS
            and not _OF_TRAINING.fullmatch(top)
            and sum(sizes[name] for name in names) <= LARGEST_FOLDER_BYTES
            and not any(name.endswith((*WEIGHTS, *_DATA)) for name in names)
        ):
            kept += names
        else:
            others.append(f"{top}/")
    return kept, others


def folders_of(directory: Path) -> tuple[str, ...]:
    """The folders that modules.json of a directory names, as `module_folders`; none where it cannot be read."""
    return module_folders(lenient(read_json)(directory / MODULES_FILE))


def module_folders(modules: Any) -> tuple[str, ...]:
    """The folders that the content of modules.json names, but for `""` and what lies outside of the directory."""
    listed = modules if isinstance(modules, list) else []
    folders = (module_folder(module.get("path")) for module in listed if isinstance(module, dict))
    return tuple(folder for folder in folders if folder)


def module_folder(path: Any) -> str | None:
    """The folder that a `path` of modules.json names, with `/`; "" is the directory itself, None lies outside of it."""
    if not isinstance(path, str) or "\0" in path:
        return None
    folder = PurePosixPath(path.replace("\\", "/"))
    inside = not folder.is_absolute() and ".." not in folder.parts
    return "/".join(folder.parts) if inside else None


def in_one_line(left_out: Sequence[str]) -> str:
    """`onnx/, pytorch_model-*-of-00002.bin, tf_model.h5`: shards as one name, no more than eight names."""
    names = list(dict.fromkeys(_SHARD.sub(r"-*-of-\1", name) for name in left_out))
    more = [f"{len(names) - 8} more"] if len(names) > 8 else []
    return ", ".join([*names[:8], *more])


def _other_format(name: str, beside: Collection[str]) -> str | None:
    """The file, or the folder that it lies in, if it is another format of the weights of a module."""
    parts = name.split("/")
    for depth, part in enumerate(parts[1:-1], 2):
        if part.lower() in _OTHER_FORMAT_FOLDERS:
            return "/".join(parts[:depth]) + "/"
    is_second = parts[-1] == "pytorch_model.bin" and "/".join([*parts[:-1], "model.safetensors"]) in beside
    return name if is_second or name.endswith((*_OTHER_WEIGHTS, *_DATA)) else None


ADAPTER = "adapter_config.json"
"""Its weights fit the original model; transformers would look for them beside the result."""
_READ = "Give the model with model.safetensors or pytorch_model.bin"
_CONVERT = f"{_READ}, or convert it with {{}}: from_pretrained(DIR, {{}}).save_pretrained(NEW)."
_FORMATS = (
    (
        r"\.(gguf|ggml)",
        "weights of llama.cpp, in GGUF",
        "Give one file here that ends in .gguf.",
    ),
    (
        r"\.h5|\.ckpt\.index|\bsaved_model\.pb",
        "weights of TensorFlow",
        _CONVERT.format("transformers 4", "from_tf=True"),
    ),
    (r"\.msgpack", "weights of Flax", _CONVERT.format("transformers 4", "from_flax=True")),
    (
        r"\.onnx|\bopenvino\w*\.xml",
        "a model exported to ONNX or OpenVINO",
        "Give the model that was exported: model.safetensors or pytorch_model.bin.",
    ),
    (
        r"\b(consolidated[.\w-]*\.(pth|safetensors)|params\.json)",
        "weights in a format of its authors",
        f"{_READ}, or convert it with the script of transformers for its family.",
    ),
    (
        r"-\d+-of-\d+\.(safetensors|bin)",
        "shards of weights, and no index of the shards",
        "Download the index too: model.safetensors.index.json or pytorch_model.bin.index.json.",
    ),
    (
        r"\.(pt|pth|ckpt|ot|tflite|mlmodel|mnn|pdparams|engine|npz|distcp)",
        "weights in another format",
        f"{_READ}.",
    ),
)
"""End of a file's name, what it holds, and what to do."""


def described(names: Collection[str], where: str, read: Callable[[str], Any]) -> tuple[str, str] | None:
    """Say what a folder with these files is, and what to do; None if the names do not tell.

    Args:
        names: paths of its files, with `/`.
        where: the folder's name, for what to do.
        read: gives the JSON of one of its files, or None.
    """
    # Modules of sentence-transformers (1_Pooling) have a config.json too, and are no models.
    inner = sorted(
        name.removesuffix("/config.json")
        for name in names
        if re.fullmatch(r"(?!\d+_[A-Z])[^/]+/config\.json", name)
    )
    if not names:
        return "an empty directory", "Copy a model into it: config.json, weights and tokenizer."
    if ADAPTER in names:
        config = read(ADAPTER)
        config = config if isinstance(config, dict) else {}
        kind, base = str(config.get("peft_type") or "LoRA"), config.get("base_model_name_or_path")
        return (
            f"an adapter ({kind}){f' of {base}' if base else ''}, not a whole model",
            "Give a directory here with its adapter_config.json, or its base model if the adapter consists of prompts.",
        )
    if "model_index.json" in names:
        parts = [f"{where}/{name}" for name in inner if name.startswith("text_encoder")]
        remedy = f"Give its text encoder: {parts[0]}." if parts else "Give a language model."
        return "a pipeline of diffusers, made of several models (model_index.json)", remedy
    for ending, what, remedy in _FORMATS:
        if found := next((name for name in sorted(names) if re.search(f"({ending})$", name)), None):
            return f"holds {what} ({found})", remedy
    if "config.json" in names:
        return None
    if inner:
        shown = ", ".join(f"{where}/{name}" for name in inner[-3:])
        return "not a checkpoint, but a folder of checkpoints", f"Give one of them: {shown}."
    if any(name.endswith((".safetensors", ".bin")) for name in names):
        return "holds weights and no config.json", "Copy the model's config.json into it, and its tokenizer."
    return None


def of_directory(directory: Path) -> tuple[str, str] | None:
    """`described`, of a directory here."""
    names = [entry.name for entry in directory.iterdir() if entry.is_file()]
    for pattern in ("*/config.json", "*/*.onnx"):
        names += [path.relative_to(directory).as_posix() for path in directory.glob(pattern)]
    return described(names, str(directory), lambda name: lenient(read_json)(directory / name))


def of_file(path: Path) -> tuple[str, str]:
    """Say what a file is that was given instead of a directory, and what to do."""
    is_adapter = path.name.startswith("adapter_")
    found = of_directory(path.parent) if is_adapter else described([path.name], "", lambda _: None)
    if (path.parent / "config.json").is_file() and not is_adapter:
        found = "", f"Give the directory that holds it: {path.parent}."
    what, remedy = found or ("", "Give the directory that holds config.json and the weights.")
    return f"a file, not a directory{f' ({what})' if what else ''}", remedy


def is_prompt(directory: Path) -> bool:
    """Whether an adapter consists of prompts, which cannot be merged into weights."""
    kind = str(lenient(lambda: read_json(directory / ADAPTER)["peft_type"])())
    return "PROMPT" in kind or kind in ("P_TUNING", "PREFIX_TUNING")
