"""The demo's model: a small NLLB-MoE with prunecli's own sparse FFNs, and its stock Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.modules.sparse_ffn import SparseFFN
from tools.demo.vocabulary import BOS, EOS, PAD

SIZES: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "num_experts": 64,
    "max_position_embeddings": 128,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "moe_token_dropout": 0.0,
    "normalize_router_prob_before_dropping": True,
    "decoder_start_token_id": EOS,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

UNUSED = (
    "_name_or_path",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "transformers_version",
)
"""Keys of every transformers config that say nothing about this model."""


def build_model(vocab_size: int) -> Any:
    """A fresh NllbMoeForConditionalGeneration whose sparse FFNs are `SparseFFN`.

    Weights are drawn so that a model this narrow learns fast: Xavier for matrices, embeddings of unit variance after
    their scaling by sqrt(d_model).
    """
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    config = NllbMoeConfig(vocab_size=vocab_size, **{**SIZES, "num_experts": 2})
    model = NllbMoeForConditionalGeneration(config)
    config.num_experts = SIZES["num_experts"]
    for stack in (model.model.encoder, model.model.decoder):
        for layer in stack.layers:
            if layer.is_sparse:
                layer.ffn = SparseFFN(config.d_model, config.encoder_ffn_dim, config.num_experts)
    for name, parameter in model.named_parameters():
        if name.endswith("shared.weight"):
            nn.init.normal_(parameter, std=config.d_model**-0.5)
        elif parameter.dim() == 2 and "router" not in name and not name.endswith("bias"):
            nn.init.xavier_uniform_(parameter)
    return model


def sparse_ffns(model: Any) -> dict[str, SparseFFN]:
    """The sparse FFNs by their names, encoder first."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, SparseFFN)}
    return dict(sorted(found.items(), key=lambda item: "decoder" in item[0]))


def stock_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its stock name, each expert apart, tied embeddings once."""
    sparse = sparse_ffns(model)
    aliases = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    for name, tensor in model.state_dict().items():
        owner, _, attribute = name.rpartition(".")
        if owner in sparse:
            linear, kind = attribute.split("_")
            for expert, values in enumerate(tensor):
                yield f"{owner}.experts.expert_{expert}.{linear}.{kind}", values
        elif name not in aliases:
            yield name, tensor


def save_checkpoint(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write the stock directory in float16: config, generation config, weights, tokenizer."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in model.config.to_dict().items() if key not in UNUSED}
    config |= {"architectures": [type(model).__name__], "dtype": "float16"}
    generation = {
        "bos_token_id": BOS,
        "decoder_start_token_id": EOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "max_length": model.config.max_position_embeddings,
    }
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        text = json.dumps(values, indent=2, sort_keys=True) + "\n"
        (directory / name).write_text(text, encoding="utf-8")
    tensors = {name: values.detach().to(torch.float16).contiguous() for name, values in stock_tensors(model)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(directory)
