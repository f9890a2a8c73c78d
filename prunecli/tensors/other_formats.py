"""What a file or folder is that is no checkpoint of transformers, and what to do: told by the names of files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from prunecli.tensors.json_files import lenient, read_json

ADAPTER = "adapter_config.json"
_READ = "Give the model with model.safetensors or pytorch_model.bin"
_CONVERT = f"{_READ}, or convert it with {{}}: from_pretrained(DIR, {{}}).save_pretrained(NEW)."
_FORMATS: tuple[tuple[str, str, str], ...] = (
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
    """What a folder with these files is, and what to do; None where the names do not tell.

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
        return _adapter(read(ADAPTER) or {})
    if "model_index.json" in names:
        parts = [f"{where}/{name}" for name in inner if name.startswith("text_encoder")]
        remedy = f"Give its text encoder: {parts[0]}." if parts else "Give a language model."
        return "a pipeline of diffusers, made of several models (model_index.json)", remedy
    for ending, what, remedy in _FORMATS:
        if found := next((name for name in sorted(names) if re.search(f"({ending})$", name)), None):
            return f"holds {what} ({found})", remedy.format(file=found)
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
    return described(names, str(directory), lambda name: _object(directory / name))


def of_file(path: Path) -> tuple[str, str]:
    """What a file is that was given in the place of a directory, and what to do."""
    is_adapter = path.name.startswith("adapter_model")
    found = of_directory(path.parent) if is_adapter else described([path.name], str(path.parent), _object)
    if (path.parent / "config.json").is_file() and not is_adapter:
        found = "", f"Give the directory that holds it: {path.parent}."
    what, remedy = found or ("", "Give the directory that holds config.json and the weights.")
    return f"a file, not a directory{f' ({what})' if what else ''}", remedy


@lenient
def _object(path: Path | str) -> Any:
    value = read_json(Path(path))
    return value if isinstance(value, dict) else None


def is_prompt(directory: Path) -> bool:
    """Whether an adapter consists of prompts, which cannot be merged into weights."""
    kind = str((_object(directory / ADAPTER) or {}).get("peft_type"))
    return "PROMPT" in kind or kind in ("P_TUNING", "PREFIX_TUNING")


def _adapter(config: dict[str, Any]) -> tuple[str, str]:
    kind, base = str(config.get("peft_type") or "LoRA"), config.get("base_model_name_or_path")
    return (
        f"an adapter ({kind}){f' of {base}' if base else ''}, not a whole model",
        "Give a directory here with its adapter_config.json, or its base model if the adapter consists of prompts.",
    )
