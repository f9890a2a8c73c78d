"""Tiny configs of the mixture-of-experts language models, one for each family: as its stock class is made."""

from typing import Any

import transformers

from tests.families import tiny

EXPERTS = 8
"""Experts of a layer, by the rules of `tiny`."""
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_DEEPSEEK_V2 = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
_SWITCH = {"d_model": 32, "num_layers": 4, "num_decoder_layers": 4, "decoder_start_token_id": 0}
CHANGES = {
    "qwen3_moe": {"mlp_only_layers": [1]},
    "minimax": {"head_dim": 16},
    "glm4_moe": {"n_group": 2},
    "glm_moe_dsa": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "dots1": {"first_k_dense_replace": 1},
    "deepseek_v2": {"first_k_dense_replace": 1, **_DEEPSEEK_V2},
    "kimi_linear": {"num_expert_group": 2},
    "flex_olmo": {"num_experts": EXPERTS},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
    "switch_transformers": {**_SWITCH, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
}
"""Model type -> what is neither by the rules of `tiny` nor of `SIZES`."""
MIXTURES = (
    "qwen3_moe",
    "qwen2_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "deepseek_v3",
    "dots1",
    "solar_open",
    "mimo_v2_flash",
    "deepseek_v2",
    "exaone_moe",
    "minimax_m2",
    "mixtral",
    "minimax",
    "phimoe",
    "kimi_linear",
    "olmoe",
    "flex_olmo",
    "cohere2_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "ernie4_5_moe",
    "hy_v3",
    "afmoe",
    "laguna",
    "lfm2_moe",
    "jamba",
    "hunyuan_v1_moe",
    "nemotron_h",
    "llama4_text",
    "switch_transformers",
)
"""Model types with a config of `values_of`."""


def values_of(model_type: str) -> dict[str, Any]:
    """The values of a tiny config."""
    rules = tiny.values_of(transformers.CONFIG_MAPPING[model_type])
    return {**rules, **tiny.OVERRIDES.get(model_type, {}), **SIZES, **CHANGES.get(model_type, {})}
