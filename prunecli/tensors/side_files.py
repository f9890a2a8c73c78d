"""What travels along when tensors are rewritten (tokenizer, templates, code, modules), and what is left out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prunecli.tensors import belonging

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

    Links to files are followed, as the snapshots of the hub's cache are made of them; links to folders where
    modules.json names them.

    Args:
        weights: the files whose tensors are rewritten.
    """
    modules = module_folders(directory)
    linked = {folder.split("/")[0] for folder in modules}
    sizes: dict[str, int] = {}
    odd: list[str] = []
    for path in _walk(directory, linked):
        name = path.relative_to(directory).as_posix()
        if path.is_dir() or not path.is_file():
            odd += [f"{name}/" if path.is_dir() else name]
        elif path not in weights and name not in _REWRITTEN:
            sizes[name] = path.stat().st_size
    carried, left_out = belonging.belonging(sizes, modules)
    # A link, or what is no file, within a folder that goes as a whole is not worth a word.
    odd = [name for name in odd if "/" not in name[:-1] or name.split("/")[0] in linked]
    return SideFiles(
        tuple(directory / name for name in carried),
        tuple(_printable(name) for name in sorted([*left_out, *odd])),
    )


def module_folders(directory: Path) -> tuple[str, ...]:
    """The folders that modules.json of a directory names, but for the directory itself and what lies outside."""
    try:
        modules = json.loads((directory / belonging.MODULES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ()
    return belonging.module_folders(modules)


def in_one_line(left_out: Sequence[str], most: int = 8) -> str:
    """`onnx/, pytorch_model-*-of-00002.bin, tf_model.h5`: shards as one name, no more than `most` names."""
    names = list(dict.fromkeys(_SHARD.sub(r"-*-of-\1", name) for name in left_out))
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def _walk(directory: Path, followed: Collection[str]) -> Iterator[Path]:
    """What is not hidden in a directory and its folders: files, and whatever is not gone into.

    Args:
        followed: folders of the directory that are gone into even as links, unless they hold the directory.
    """
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            continue
        is_followed = path.name in followed and not directory.resolve().is_relative_to(path.resolve())
        if path.is_dir() and (is_followed or not path.is_symlink()):
            yield from _walk(path, ())
        else:
            yield path


def _printable(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")  # a name need not be text, and this one is printed
