"""Where each family keeps its FFNs, restated by hand, and checkpoints with changed ones, written without any method."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.families import GATED_T5, tiny_family
from tests.tiny import tiny_nllb_moe, write_json, write_weights

BART = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1, "fc2.bias": None}
BERT = {
    "intermediate.dense.weight": 0,
    "intermediate.dense.bias": 0,
    "output.dense.weight": 1,
    "output.dense.bias": None,
}


@dataclass(frozen=True)
class Layout:
    """The FFNs of a tiny model.

    Attributes:
        names: FFN -> its norm.
        tensors: of one FFN -> the axis of its hidden units; those of the output layer last.
        width_keys: config keys of their widths.
        post_norm: whether the norm comes after the residual connection.
        norms_after: FFN -> a second norm, between it and the residual connection.
    """

    names: dict[str, str]
    tensors: dict[str, int | None]
    width_keys: tuple[str, ...]
    post_norm: bool = False
    norms_after: dict[str, str] = field(default_factory=dict)

    def norms(self, name: str) -> tuple[str, ...]:
        """Beginnings of the names of the tensors of an FFN's norms."""
        second = (f"{self.norms_after[name]}.",) if name in self.norms_after else ()
        return (f"{self.names[name]}.", *second)

    @property
    def input(self) -> str:
        """The first linear layer, relative to the FFN."""
        return next(iter(self.tensors)).rpartition(".")[0]

    @property
    def output(self) -> str:
        """The last linear layer, relative to the FFN."""
        return list(self.tensors)[-1].rpartition(".")[0]

    @property
    def is_module(self) -> bool:
        """Whether an FFN is a module of its own, rather than a part of the layer."""
        return not any(norm.startswith(f"{name}.") for name, norm in self.names.items())


def _seq2seq(*, post_norm: bool) -> Layout:
    layers = [
        f"model.{side}.layers.{n}" for side, depth in (("encoder", 3), ("decoder", 2)) for n in range(depth)
    ]
    names = {layer: f"{layer}.final_layer_norm" for layer in layers}
    return Layout(names, BART, ("encoder_ffn_dim", "decoder_ffn_dim"), post_norm)


def _t5(tensors: dict[str, int | None]) -> Layout:
    parts = [f"encoder.block.{n}.layer.1" for n in range(3)] + [
        f"decoder.block.{n}.layer.2" for n in range(2)
    ]
    return Layout({f"{part}.DenseReluDense": f"{part}.layer_norm" for part in parts}, tensors, ("d_ff",))


def _bert(model: str) -> Layout:
    layers = [f"{model}.encoder.layer.{n}" for n in range(3)]
    return Layout(
        {layer: f"{layer}.output.LayerNorm" for layer in layers}, BERT, ("intermediate_size",), post_norm=True
    )


LLAMA = Layout(
    {f"model.layers.{n}.mlp": f"model.layers.{n}.post_attention_layernorm" for n in range(3)},
    {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1},
    ("intermediate_size",),
)

GEMMA = Layout(
    {f"model.layers.{n}.mlp": f"model.layers.{n}.pre_feedforward_layernorm" for n in range(3)},
    LLAMA.tensors,
    LLAMA.width_keys,
    norms_after={f"model.layers.{n}.mlp": f"model.layers.{n}.post_feedforward_layernorm" for n in range(3)},
)

LAYOUTS: dict[str, Layout] = {
    "nllb-moe": Layout(
        {
            f"model.{side}.layers.{n}.ffn": f"model.{side}.layers.{n}.ff_layer_norm"
            for side in ("encoder", "decoder")
            for n in (0, 2)
        },
        BART,
        ("encoder_ffn_dim", "decoder_ffn_dim"),
    ),
    "m2m_100": _seq2seq(post_norm=False),
    "mbart": _seq2seq(post_norm=False),
    "pegasus": _seq2seq(post_norm=False),
    "bart": _seq2seq(post_norm=True),
    "marian": _seq2seq(post_norm=True),
    "t5": _t5({"wi.weight": 0, "wo.weight": 1}),
    "t5-gated": _t5({"wi_0.weight": 0, "wi_1.weight": 0, "wo.weight": 1}),
    "bert": _bert("bert"),
    "roberta": _bert("roberta"),
    "xlm-roberta": _bert("roberta"),
    "mt5": _t5({"wi_0.weight": 0, "wi_1.weight": 0, "wo.weight": 1}),
    "distilbert": Layout(
        {
            f"distilbert.transformer.layer.{n}.ffn": f"distilbert.transformer.layer.{n}.output_layer_norm"
            for n in range(3)
        },
        {"lin1.weight": 0, "lin1.bias": 0, "lin2.weight": 1, "lin2.bias": None},
        ("hidden_dim",),
        post_norm=True,
    ),
    "opt": Layout(
        {f"model.decoder.layers.{n}": f"model.decoder.layers.{n}.final_layer_norm" for n in range(3)},
        BART,
        ("ffn_dim",),
    ),
    "gpt2": Layout(
        {f"transformer.h.{n}.mlp": f"transformer.h.{n}.ln_2" for n in range(3)},
        {"c_fc.weight": 1, "c_fc.bias": 0, "c_proj.weight": 0, "c_proj.bias": None},
        ("n_inner",),
    ),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "phi3": replace(LLAMA, tensors={"gate_up_proj.weight": 0, "down_proj.weight": 1}),
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
}
"""Of `tiny`'s models; the dense FFNs of NLLB-MoE, whose layers 1 and 3 are sparse."""


def tiny(directory: Path, case: str, **changes: Any) -> Path:
    """The tiny checkpoint of a case of `LAYOUTS`; the two stacks of a model have FFNs of one width."""
    if case == "nllb-moe":
        return tiny_nllb_moe(directory, config=changes)
    if "decoder_ffn_dim" in LAYOUTS[case].width_keys:
        changes = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, **changes}
    gated = GATED_T5 if case == "t5-gated" else {}
    return tiny_family(directory, case.removesuffix("-gated"), **gated, **changes)


def weights(directory: Path) -> dict[str, np.ndarray]:
    """What the one file of weights holds."""
    return dict(load_file(directory / "model.safetensors"))


def write_copy(source: Path, target: Path, tensors: Mapping[str, np.ndarray], **changes: Any) -> Path:
    """The checkpoint with other weights and changes to its config.json."""
    shutil.copytree(source, target)
    write_weights(target, {name: np.ascontiguousarray(value) for name, value in tensors.items()})
    config = json.loads((source / "config.json").read_text())
    write_json(target / "config.json", {**config, **changes})
    return target


def blocks_of(suffix: str) -> int:
    """How often all hidden units lie on the axis of a tensor."""
    return 2 if suffix == "gate_up_proj.weight" else 1


def narrowed(matrix: np.ndarray, width: int, axis: int, blocks: int) -> np.ndarray:
    """The first `width` hidden units; those of a fused matrix lie on its axis `blocks` times."""
    parts = np.split(matrix, blocks, axis)
    return np.concatenate([np.take(part, range(width), axis) for part in parts], axis)


def write_changed(source: Path, target: Path, case: str, changes: Mapping[str, Mapping[str, Any]]) -> Path:
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
            norms = layout.norms(name)
            held = {tensor: value for tensor, value in held.items() if not tensor.startswith(norms)}
    model_type = json.loads((source / "config.json").read_text())["model_type"]
    structure = {"version": 1, "ffn": changes}
    return write_copy(source, target, held, model_type=f"prunecli-{model_type}", prunecli=structure)
