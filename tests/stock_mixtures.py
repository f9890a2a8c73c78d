"""Tiny mixture-of-experts language models of transformers' own classes, held in memory, with random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli.text.tokens import load_tokenizer
from tests.families import tiny
from tests.tiny import write_plain_tokenizer

EXPERTS = 8
TAPPED = ("llama4_text", "switch_transformers")
"""The families whose experts are observed in ways of their own."""
_NAMES = (
    "qwen3_moe qwen2_moe qwen3_next qwen3_5_moe_text glm4_moe glm4_moe_lite glm_moe_dsa deepseek_v3 dots1 solar_open "
    "mimo_v2_flash deepseek_v2 exaone_moe minimax_m2 mixtral minimax phimoe kimi_linear olmoe flex_olmo cohere2_moe "
    "gpt_oss granitemoe granitemoeshared granitemoehybrid ernie4_5_moe hy_v3 afmoe laguna lfm2_moe jamba "
    "hunyuan_v1_moe nemotron_h"
)
OBSERVED = tuple(_NAMES.split())
"""The families whose classes let their experts be run by a function of one's own."""
_COMMON = {"hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Sums over 32 values are the same, to the last bit, however many rows a product has."""
_KINDS = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
_SETTINGS = {
    "qwen3_moe": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3_next": _KINDS,
    "qwen3_5_moe_text": _KINDS,
    "kimi_linear": _KINDS,
    "glm4_moe": {"n_group": 2},
    "deepseek_v2": {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "flex_olmo": {"num_experts": EXPERTS},
    "granitemoehybrid": {"mamba_d_head": 8},
    "dbrx": {"hidden_size": 48},  # its experts' config has the width, too
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
    "minimax": {"head_dim": 16},
    "switch_transformers": {
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2,
        "decoder_start_token_id": 0,
    },
}


def tiny_mixture(model_type: str, *, seed: int = 0, **config: Any) -> Any:
    """A model in float32, in evaluation mode: weights that tell tokens apart, biases of routers too.

    Args:
        config: in place of what the rules of `tests.families.tiny` say.
    """
    made = tiny.tiny_config(model_type, **{**_COMMON, **_SETTINGS.get(model_type, {}), **config})
    model = tiny.auto_class(model_type)(made).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in name and tensor.shape[-1:] == (EXPERTS,):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.1)
            elif tensor.dim() > 1 and tensor.is_floating_point() and "A_log" not in name:
                scale = 1.0 if tensor.shape[:-1] == (EXPERTS,) else 0.05  # routers
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return model


def save_mixture(folder: Path | str, model_type: str, **config: Any) -> Path:
    """A directory with a `tiny_mixture` and a plain tokenizer."""
    tiny_mixture(model_type, **config).save_pretrained(folder)
    write_plain_tokenizer(folder)
    return Path(folder)


def tiny_images_model() -> Any:
    """A Llama 4 of text and images, whose config keeps the language model's keys one level down."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration, __version__

    widths = ("hidden_size", "projector_input_dim", "projector_output_dim", "vision_output_dim")
    images = {**dict.fromkeys(widths, 16), "image_size": 28, "patch_size": 14, "intermediate_size": 32}
    images |= {"num_attention_heads": 2, "num_hidden_layers": 1}
    torch.manual_seed(3)
    config = Llama4Config(
        text_config=tiny.tiny_config("llama4_text", vocab_size=80).to_dict(), vision_config=images
    )
    model = Llama4ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)  # its class leaves some as they lay in memory
    try:
        model(torch.ones(1, 1, dtype=torch.long))
    except AttributeError as error:
        pytest.skip(f"transformers {__version__} does not run this class: {error}")
    return model


def write_sentinels(directory: Path | str) -> None:
    """Write the files of a tokenizer that ends its texts, with marks of masked spans."""
    write_plain_tokenizer(directory, ("$A </s>", "$A $B </s>"))
    tokenizer = load_tokenizer(Path(directory))
    tokenizer.add_tokens([f"<extra_id_{number}>" for number in range(4)])
    tokenizer.save_pretrained(directory)
