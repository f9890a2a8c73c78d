"""Checkpoints with changed FFNs, written without any method."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.families import tiny_family
from tests.families.records import CASES, FAMILIES, own_layouts
from tests.reference import ffn as reference
from tests.tiny import change_config, config_of, write_weights

LAYOUTS = {name: CASES[name].ffns for name in (*FAMILIES, "t5-gated")}
"""Of the tiny models; the dense FFNs of NLLB-MoE, whose layers 1 and 3 are sparse."""

OWN_SHAPES = own_layouts(LAYOUTS)
"""Families whose FFNs and norms lie in different ways."""


def tiny(directory: Path, case: str, **changes: Any) -> Path:
    """The tiny checkpoint of a case; the two stacks of a model have FFNs of one width."""
    widths = CASES[case].ffns.width_keys
    if len(widths) == 2:
        changes = {**dict.fromkeys(widths, CASES[case].config[widths[0]]), **changes}
    return tiny_family(directory, case, **changes)


def weights(directory: Path | str) -> dict[str, np.ndarray]:
    """The tensors of the one file of weights."""
    return dict(load_file(f"{directory}/model.safetensors"))


def ffns_of(held: Mapping[str, np.ndarray], case: str) -> dict[str, reference.Ffn]:
    """The FFNs among the tensors of a checkpoint."""
    tensors = LAYOUTS[case].tensors
    return {
        name: reference.read({suffix: held[f"{name}.{suffix}"] for suffix in tensors}, tensors)
        for name in LAYOUTS[case].names
        if f"{name}.{next(iter(tensors))}" in held
    }


def write_copy(
    source: Path | str, target: Path | str, tensors: Mapping[str, np.ndarray], **changes: Any
) -> Path:
    """The checkpoint with other weights and changes to its config.json."""
    target = Path(shutil.copytree(source, target))
    write_weights(target, {name: np.ascontiguousarray(value) for name, value in tensors.items()})
    change_config(target, **changes)
    return target


def blocks_of(suffix: str) -> int:
    """How often all hidden units lie on the axis of a tensor."""
    return 2 if suffix == "gate_up_proj.weight" else 1


def narrowed(matrix: np.ndarray, width: int, axis: int, blocks: int) -> np.ndarray:
    """The first `width` hidden units; those of a fused matrix lie on its axis `blocks` times."""
    parts = np.split(matrix, blocks, axis)
    return np.concatenate([np.take(part, range(width), axis) for part in parts], axis)


def write_changed(
    source: Path | str, target: Path | str, case: str, changes: Mapping[str, Mapping[str, Any]]
) -> Path:
    """The checkpoint with `changes` to its FFNs, as JSON; a width keeps the first hidden units."""
    layout, held = LAYOUTS[case], weights(source)
    for name, change in changes.items():
        for suffix, axis in layout.tensors.items():
            full = f"{name}.{suffix}"
            if "width" not in change:
                del held[full]
            elif axis is not None:
                held[full] = narrowed(held[full], change["width"], axis, blocks_of(suffix))
        if change.get("removed"):
            norm = f"{layout.names[name]}."
            held = {tensor: value for tensor, value in held.items() if not tensor.startswith(norm)}
    model_type = config_of(source)["model_type"]
    structure = {"version": 1, "ffn": changes}
    return write_copy(source, target, held, model_type=f"prunecli-{model_type}", prunecli=structure)
