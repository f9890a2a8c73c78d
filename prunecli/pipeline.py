"""From a decision to a directory: the same few steps for every method."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunecli.architectures import REDUCED_PREFIX
from prunecli.checkpoint.card import front_matter, model_card
from prunecli.checkpoint.dtypes import config_dtype
from prunecli.checkpoint.layout import check_tensors, sparse_layers
from prunecli.checkpoint.reader import Checkpoint, open_checkpoint
from prunecli.checkpoint.stream import Output
from prunecli.checkpoint.structure import KEY, Structure
from prunecli.checkpoint.transaction import new_directory
from prunecli.checkpoint.writer import SHARD_BYTES, write_tensors
from prunecli.modules.shim import SHIM_FILE, SHIM_SOURCE
from prunecli.progress import Progress, silent


@dataclass(frozen=True)
class Rewrite:
    """A decision made concrete; nothing is written yet.

    Attributes:
        structure: of the result, its history included.
        outputs: every tensor of the result.
        config: config.json of the result.
    """

    structure: Structure
    outputs: tuple[Output, ...]
    config: dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """Sizes before and after, of the tensors alone."""

    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int


def summarize(source: Checkpoint, rewrite: Rewrite) -> Summary:
    """Parameters and bytes before and after."""
    return Summary(
        parameters_before=sum(info.numel for info in source.tensors.values()),
        parameters_after=sum(output.info.numel for output in rewrite.outputs),
        bytes_before=source.total_bytes,
        bytes_after=sum(output.nbytes for output in rewrite.outputs),
    )


def stock_config(source: Checkpoint, structure: Structure) -> dict[str, Any]:
    """config.json of the result: the source's, patched as JSON.

    The same number of experts in every sparse layer is a stock model of that many; anything else gets a model type of
    its own, which the stock class refuses. Either opens with `trust_remote_code=True` through `auto_map`.
    """
    family = source.require_architecture()
    counts = {
        len(structure.experts[layer.name]) if layer.name in structure.experts else layer.num_experts
        for layer in sparse_layers(source)
    }
    config = {key: value for key, value in source.config.items() if key not in (KEY, "auto_map")}
    auto_map = {family.auto_class: "modeling_prunecli.PrunecliModel"}
    if len(counts) == 1:
        config["model_type"] = family.model_type
        config.update(dict.fromkeys(family.expert_count, counts.pop()))
    else:
        config["model_type"] = REDUCED_PREFIX + family.model_type
        auto_map["AutoConfig"] = "modeling_prunecli.PrunecliConfig"
    return {**config, "auto_map": auto_map, KEY: structure.to_json()}


def rewrite_checkpoint(
    source: Checkpoint,
    rewrite: Rewrite,
    output: Path,
    *,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> Summary:
    """Stream the result into `output`, which appears whole or not at all.

    Raises:
        OutputError: `output` exists, overlaps the source, or the disk lacks room.
        CheckpointError: the source is damaged, or the result would not be what its config says.
    """
    summary = summarize(source, rewrite)
    with new_directory(
        output, force=force, needed_bytes=summary.bytes_after, source=source.path
    ) as directory:
        write_tensors(source, rewrite.outputs, directory, shard_bytes=shard_bytes, progress=progress)
        _write_config(rewrite, directory)
        for path in source.side_files:
            place = directory / path.relative_to(source.path)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)
        (directory / SHIM_FILE).write_text(SHIM_SOURCE, encoding="utf-8")
        card = source.path / "README.md"
        front = front_matter(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else {}
        text = model_card(output.name, rewrite.structure, rewrite.config, front)
        (directory / "README.md").write_text(text, encoding="utf-8")
        with open_checkpoint(directory) as made:
            check_tensors(made)
    return summary


def _write_config(rewrite: Rewrite, directory: Path) -> None:
    config = dict(rewrite.config)
    dtype = _main_dtype(rewrite.outputs)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[key] = config_dtype(dtype)
    text = json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def _main_dtype(outputs: Sequence[Output]) -> str:
    """The type that most bytes have."""
    held: dict[str, int] = {}
    for output in outputs:
        held[output.dtype] = held.get(output.dtype, 0) + output.nbytes
    return max(held, key=held.__getitem__)
