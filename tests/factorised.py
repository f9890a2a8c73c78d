"""Factorised checkpoints of every family, and what they should compute, restated with slow code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prunecli.methods.embeddings.factorize import fit_embeddings
from prunecli.methods.embeddings.plan import EmbeddingOptions, plan_embeddings
from prunecli.methods.embeddings.rewrite import rewrite_embeddings
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.rewrite import Rewrite
from prunecli.pipeline import apply
from tests.families import GATED_T5, NARROW_OPT, TIED_LLAMA, tiny_family
from tests.ffn_layouts import weights
from tests.reference.define import unit as slow_unit
from tests.tiny import tiny_nllb_moe

SMALL: dict[str, Any] = {"map_dim": 4, "expand_dim": 12, "depth": 2, "max_groups": 2, "epochs": 1}


@dataclass(frozen=True)
class Case:
    """A family, and where its tokens come in and go out.

    Attributes:
        make: writes the checkpoint.
        input: modules of the input table; the first gives the tensor its name.
        output: the output layer.
        tied: whether they share the table.
        stock: whether a stock config can say that the output has a table of its own.
    """

    make: Callable[[Path], Path]
    input: tuple[str, ...]
    output: str
    tied: bool = True
    stock: bool = False


BART = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens")


def _family(model_type: str, **changes: Any) -> Callable[[Path], Path]:
    return lambda directory: tiny_family(directory, model_type, **changes)


CASES = {
    "nllb-moe": Case(tiny_nllb_moe, BART, "lm_head"),
    "m2m_100": Case(_family("m2m_100", scale_embedding=True), BART, "lm_head"),
    "marian": Case(_family("marian", scale_embedding=True), BART, "lm_head"),
    "pegasus": Case(_family("pegasus", scale_embedding=True), BART, "lm_head"),
    "bart": Case(_family("bart"), BART, "lm_head"),
    "mbart": Case(_family("mbart", scale_embedding=True), BART, "lm_head"),
    "t5": Case(_family("t5"), ("shared", "encoder.embed_tokens", "decoder.embed_tokens"), "lm_head"),
    "t5-gated": Case(
        _family("t5", **GATED_T5),
        ("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
        "lm_head",
        tied=False,
        stock=True,
    ),
    "bert": Case(
        _family("bert"), ("bert.embeddings.word_embeddings",), "cls.predictions.decoder", stock=True
    ),
    "bert-untied": Case(
        _family("bert", tie_word_embeddings=False),
        ("bert.embeddings.word_embeddings",),
        "cls.predictions.decoder",
        tied=False,
        stock=True,
    ),
    "roberta": Case(
        _family("roberta"), ("roberta.embeddings.word_embeddings",), "lm_head.decoder", stock=True
    ),
    "xlm-roberta": Case(
        _family("xlm-roberta"), ("roberta.embeddings.word_embeddings",), "lm_head.decoder", stock=True
    ),
    "mt5": Case(
        _family("mt5"),
        ("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
        "lm_head",
        tied=False,
        stock=True,
    ),
    "distilbert": Case(
        _family("distilbert"), ("distilbert.embeddings.word_embeddings",), "vocab_projector", stock=True
    ),
    "opt": Case(_family("opt"), ("model.decoder.embed_tokens",), "lm_head", stock=True),
    "opt-narrow": Case(_family("opt", **NARROW_OPT), ("model.decoder.embed_tokens",), "lm_head", stock=True),
    "gpt2": Case(_family("gpt2"), ("transformer.wte",), "lm_head", stock=True),
    "llama": Case(_family("llama"), ("model.embed_tokens",), "lm_head", tied=False, stock=True),
    "mistral": Case(_family("mistral"), ("model.embed_tokens",), "lm_head", tied=False, stock=True),
    "qwen2": Case(_family("qwen2"), ("model.embed_tokens",), "lm_head", tied=False, stock=True),
    "qwen3": Case(_family("qwen3"), ("model.embed_tokens",), "lm_head", tied=False, stock=True),
    "gemma2": Case(_family("gemma2"), ("model.embed_tokens",), "lm_head", stock=True),
    "gemma3_text": Case(_family("gemma3_text"), ("model.embed_tokens",), "lm_head", stock=True),
    "phi3": Case(_family("phi3"), ("model.embed_tokens",), "lm_head", tied=False, stock=True),
    "llama-tied": Case(_family("llama", **TIED_LLAMA), ("model.embed_tokens",), "lm_head", stock=True),
}


def decided(source: Checkpoint, **options: Any) -> Rewrite:
    """The whole method; dimensions are small where none are given."""
    asked = EmbeddingOptions(**(SMALL | options) if not options.get("cache_alone") else {"cache": True})
    plan = plan_embeddings(source, asked)
    return rewrite_embeddings(source, plan, fit_embeddings(source, plan))


def factorised(source: Path, output: Path, **options: Any) -> Path:
    """Factorise `source`; returns `output`."""
    if options.get("side") == "output":
        options = {"expand_dim": None, "depth": None, "max_groups": None, **options}
    with open_model(source) as opened:
        apply(opened, decided(opened, **options), output)
    return output


def cached(source: Path, output: Path) -> Path:
    """Cache the unit of `source`; returns `output`."""
    with open_model(source) as opened:
        apply(opened, decided(opened, cache_alone=True), output)
    return output


def config(directory: Path) -> dict[str, Any]:
    """Its config.json."""
    return dict(json.loads((directory / "config.json").read_text()))


def expanded(
    held: Mapping[str, np.ndarray], name: str, *, padding: int | None, kind: str = "define"
) -> np.ndarray:
    """Rows of the unit `name`, a token at a time."""
    own = {key.removeprefix(f"{name}."): value for key, value in held.items() if key.startswith(f"{name}.")}
    depth = sum(key.startswith("layers.") and key.endswith(".bias") for key in own)
    layers = [(own[f"layers.{n}.weight"].tolist(), own[f"layers.{n}.bias"].tolist()) for n in range(depth)]
    last = own["reduce.weight"].tolist(), own["reduce.bias"].tolist()
    rows = [slow_unit(kind, token, layers, *last) for token in own["map.weight"].tolist()]
    if padding is not None:
        rows[padding] = [0.0] * len(rows[padding])
    return np.array(rows, np.float32)


def replaced(model: Any, case: Case, directory: Path) -> Any:
    """`model`, the original one, with the tables that the factorised checkpoint in `directory` stands for."""
    import torch
    from torch import nn

    held, change = weights(directory), config(directory)["prunecli"]["embedding"]
    name = case.input[0]
    table = model.get_parameter(f"{name}.weight")
    output = model.get_submodule(case.output)
    own_output = nn.Parameter(output.weight.detach().clone())
    if "input" in change:
        padding = model.config.pad_token_id if change["input"]["zero_padding"] else None
        rows = held[f"{name}.weight"] if change["input"]["cached"] else expanded(held, name, padding=padding)
        table = nn.Parameter(torch.from_numpy(rows))
    for module in case.input:
        model.get_submodule(module).weight = table
    output.weight = own_output
    if (made := change.get("output")) is not None and made["map_dim"] is not None:
        mapped = held[f"{name}.map.weight" if made["tied"] else f"{case.output}.weight"]
        output.weight = nn.Parameter(torch.from_numpy(mapped @ held[f"{case.output}.project.weight"]))
    return model
