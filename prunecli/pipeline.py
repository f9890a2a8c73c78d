"""From a decision to a directory: the same few steps for every method."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prunecli.architectures import REDUCED_PREFIX, Architecture
from prunecli.checkpoint.attention import attention_layers
from prunecli.checkpoint.card import model_card
from prunecli.checkpoint.declared import TIE_KEY, class_names, count
from prunecli.checkpoint.documents import write_json
from prunecli.checkpoint.dtypes import config_dtype
from prunecli.checkpoint.ffn import declared_ffns
from prunecli.checkpoint.layout import check_tensors, expected_tensors, held_sparse_layers, is_extra
from prunecli.checkpoint.reader import Checkpoint, open_checkpoint
from prunecli.checkpoint.stream import Output, check_outputs
from prunecli.checkpoint.structure import KEY, Structure
from prunecli.checkpoint.transaction import new_directory
from prunecli.checkpoint.writer import SHARD_BYTES, write_tensors
from prunecli.errors import CheckpointError
from prunecli.modules.shim import SHIM_FILE, shim_source
from prunecli.progress import Progress, silent

AUTO_CLASSES = {
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "MTModel": "AutoModelForSeq2SeqLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "Model": "AutoModel",
}
"""Ending of a class of transformers -> the `AutoModel…` that opens it; the longer endings first."""


@dataclass(frozen=True)
class Rewrite:
    """A decision made concrete; nothing is written yet.

    Attributes:
        structure: of the result, its history included.
        outputs: every tensor of the result.
        config: config.json of the result, but for the type of its weights.
        files: side files that differ from the source's, by name; None: it is left out.
    """

    structure: Structure
    outputs: tuple[Output, ...]
    config: dict[str, Any]
    files: Mapping[str, bytes | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """Sizes before and after, of the tensors alone."""

    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int


def summarize(source: Checkpoint, rewrite: Rewrite) -> Summary:
    """Parameters and bytes before and after; checks every name and shape, so that a dry run refuses what a run would.

    Raises:
        CheckpointError: source tensors that its config does not ask for, or lack of some.
    """
    check_tensors(source)
    check_outputs(source, rewrite.outputs)
    family = source.require_architecture()
    wanted = expected_tensors(family, rewrite.config, rewrite.structure)
    made = {
        output.name: output.shape
        for output in rewrite.outputs
        if output.name in wanted or not is_extra(family, output.name)
    }
    if made != wanted:
        odd = sorted(name for name in {*made, *wanted} if made.get(name) != wanted.get(name))
        raise CheckpointError(
            f"{source.path}: the result would not be what its config says: {odd[0]} would have the shape "
            f"{made.get(odd[0])}, not {wanted.get(odd[0])} ({len(odd)} such tensors)",
        )
    return Summary(
        parameters_before=sum(info.numel for info in source.tensors.values()),
        parameters_after=sum(output.info.numel for output in rewrite.outputs),
        bytes_before=source.total_bytes,
        bytes_after=sum(output.nbytes for output in rewrite.outputs),
    )


def stock_config(source: Checkpoint, structure: Structure) -> dict[str, Any]:
    """config.json of the result: the source's, patched as JSON.

    The same number of experts, of heads where the config also holds their width, and of hidden units in every layer is
    a stock model of that many, and a cached embedding a stock table; anything else gets a model type of its own, which
    the stock class refuses. Either opens with `trust_remote_code=True` through `auto_map`.
    """
    family = source.require_architecture()
    config = {key: value for key, value in source.config.items() if key not in (KEY, "auto_map")}
    auto_map = {_auto_class(source, family): "modeling_prunecli.PrunecliModel"}
    experts, heads = _even_experts(source, structure), _even_heads(source, structure)
    widths, is_plain = _even_ffns(source, structure), _has_plain_embeddings(family, structure)
    if _has_own_output_table(family, structure):
        config[TIE_KEY] = False
    if experts is not None and heads is not None and widths is not None and is_plain:
        config["model_type"] = family.model_type
        config.update(experts | heads | widths)
    else:
        config["model_type"] = REDUCED_PREFIX + family.model_type
        auto_map["AutoConfig"] = "modeling_prunecli.PrunecliConfig"
    return {**config, "auto_map": auto_map, KEY: structure.to_json()}


def _even_experts(source: Checkpoint, structure: Structure) -> dict[str, int] | None:
    """What a stock config of the result holds of experts; None where their number differs between layers."""
    family = source.require_architecture()
    if not family.expert_count:
        return {}
    counts = {
        len(structure.experts[layer.name]) if layer.name in structure.experts else layer.num_experts
        for layer in held_sparse_layers(source)
    }
    if not counts:
        return {}
    return dict.fromkeys(family.expert_count, counts.pop()) if len(counts) == 1 else None


def _even_heads(source: Checkpoint, structure: Structure) -> dict[str, int] | None:
    """What a stock config of the result holds of heads; None where it cannot express them."""
    family, config = source.require_architecture(), source.config
    layers = attention_layers(source)
    kept = {len(structure.heads.get(layer.name, layer.heads)) for layer in layers}
    if all(structure.heads.get(layer.name, layer.heads) == layer.heads for layer in layers):
        is_stock = source.model_type == family.model_type
        return {} if is_stock or not structure.heads else None
    if family.head_width is None or len(kept) != 1 or kept == {0}:
        return None
    counted = count(family, config, family.stacks[0].attentions[0].heads)
    heads = {key: count(family, config, key) * next(iter(kept)) // counted for key in family.head_counts}
    stated = {**heads, family.head_width: count(family, config, family.head_width)}
    try:
        count(family, {**config, **heads}, family.head_quotient or "1")
    except CheckpointError:
        return None
    return stated


def _even_ffns(source: Checkpoint, structure: Structure) -> dict[str, int] | None:
    """What a stock config of the result holds of FFN widths; None where it cannot express them."""
    family = source.require_architecture()
    keys = {stack.side: stack.ffn.width for stack in family.stacks}
    widths: dict[str, set[int]] = {}
    for layer in declared_ffns(family, source.config, structure):
        if layer.removed or layer.is_shared:
            return None
        widths.setdefault(keys[layer.side], set()).add(layer.width)
    if any(len(found) > 1 for found in widths.values()):
        return None
    return {key: found.pop() for key, found in widths.items() if structure.ffn}


def _has_plain_embeddings(family: Architecture, structure: Structure) -> bool:
    """Whether a stock config can express them."""
    return structure.embedding.is_stock or (
        structure.embedding.unit is None and _has_own_output_table(family, structure)
    )


def _has_own_output_table(family: Architecture, structure: Structure) -> bool:
    """Whether the output layer no longer has the input's table, and config.json can say that and nothing else."""
    output = structure.embedding.output
    return (
        output is not None
        and output.map_dim is None
        and family.embedding is not None
        and family.embedding.apart
    )


def _auto_class(source: Checkpoint, family: Architecture) -> str:
    """The `AutoModel…` that opens the class named in config.json."""
    for name in class_names(source.config):
        for ending, auto in AUTO_CLASSES.items():
            if name.endswith(ending):
                return auto
    return family.auto_class


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
    copied = sum(path.stat().st_size for path in _copied(source, rewrite).values())
    changed = sum(len(content) for content in rewrite.files.values() if content is not None)
    needed = summary.bytes_after + copied + changed
    with new_directory(output, force=force, needed_bytes=needed, source=source.path) as directory:
        write_tensors(source, rewrite.outputs, directory, shard_bytes=shard_bytes, progress=progress)
        _write_side_files(source, rewrite, directory)
        write_json(directory / "config.json", _with_dtype(rewrite))
        (directory / SHIM_FILE).write_text(shim_source(str(rewrite.config["model_type"])), encoding="utf-8")
        (directory / "README.md").write_text(_card(source, rewrite, summary), encoding="utf-8")
        with open_checkpoint(directory) as made:
            check_tensors(made)
    return summary


def _copied(source: Checkpoint, rewrite: Rewrite) -> dict[str, Path]:
    """The side files that stay as they are, by name."""
    names = {path.relative_to(source.path).as_posix(): path for path in source.side_files.carried}
    return {name: path for name, path in names.items() if name not in rewrite.files}


def _write_side_files(source: Checkpoint, rewrite: Rewrite, directory: Path) -> None:
    for name, path in _copied(source, rewrite).items():
        place = directory / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    for name, content in rewrite.files.items():
        if content is not None:
            place = directory / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)


def _card(source: Checkpoint, rewrite: Rewrite, summary: Summary) -> str:
    card = source.path / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return model_card(
        rewrite.structure,
        rewrite.config,
        text,
        (summary.parameters_before, summary.parameters_after),
        (summary.bytes_before, summary.bytes_after),
    )


def _with_dtype(rewrite: Rewrite) -> dict[str, Any]:
    config = dict(rewrite.config)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {**config, key: config_dtype(_main_dtype(rewrite.outputs))}


def _main_dtype(outputs: Sequence[Output]) -> str:
    """The type that most bytes have."""
    held: dict[str, int] = {}
    for output in outputs:
        held[output.dtype] = held.get(output.dtype, 0) + output.nbytes
    return max(held, key=held.__getitem__)
