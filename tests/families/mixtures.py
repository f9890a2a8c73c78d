"""Tiny configs of the mixture-of-experts language models, one for each family: as its stock class is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXPERTS, TOP_K = 8, 2

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": TOP_K,
    "tie_word_embeddings": False,
}
_LATENT: dict[str, Any] = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_NUMBER = {"num_experts": EXPERTS}
_LOCAL = {"num_local_experts": EXPERTS}
_ROUTED = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}
_GROUPED = {"n_group": 2, "topk_group": 1}
_UNGROUPED = {"n_group": 1, "topk_group": 1}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}

TINY: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {**_SIZES, **_LOCAL, "mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen2_moe": {**_SIZES, **_NUMBER, "shared_expert_intermediate_size": 24},
    "qwen3_next": {**_SIZES, **_NUMBER, **_DELTA},
    "qwen3_5_moe_text": {**_SIZES, **_NUMBER, **_DELTA},
    "glm4_moe": {**_SIZES, **_ROUTED, **_GROUPED},
    "glm4_moe_lite": {**_SIZES, **_ROUTED, **_LATENT, **_UNGROUPED},
    "glm_moe_dsa": {
        **_SIZES,
        **_ROUTED,
        **_LATENT,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 16,
        "index_head_dim": 8,
        "index_n_heads": 2,
    },
    "deepseek_v3": {**_SIZES, **_ROUTED, **_GROUPED, **_LATENT},
    "dots1": {**_SIZES, **_ROUTED, **_UNGROUPED},
    "solar_open": {**_SIZES, **_ROUTED, **_UNGROUPED},
    "mimo_v2_flash": {**_SIZES, **_ROUTED, **_UNGROUPED},
    "deepseek_v2": {
        **_SIZES,
        **_ROUTED,
        **_LATENT,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "exaone_moe": {**_SIZES, **_NUMBER, **_UNGROUPED, "num_shared_experts": 1},
    "minimax_m2": {**_SIZES, **_LOCAL},
    "mixtral": {**_SIZES, **_LOCAL},
    "minimax": {**_SIZES, **_LOCAL},
    "phimoe": {**_SIZES, **_LOCAL},
    "kimi_linear": {
        **_SIZES,
        **_NUMBER,
        **_LATENT,
        "num_experts_per_token": TOP_K,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "num_expert_group": 2,
        "topk_group": 1,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "olmoe": {**_SIZES, **_NUMBER, "head_dim": 8},
    "flex_olmo": {**_SIZES, **_NUMBER},
    "cohere2_moe": {**_SIZES, **_NUMBER},
    "gpt_oss": {**_SIZES, **_LOCAL},
    "granitemoe": {**_SIZES, **_LOCAL},
    "granitemoeshared": {**_SIZES, **_LOCAL, "shared_intermediate_size": 24},
    "granitemoehybrid": {
        **_SIZES,
        **_LOCAL,
        "shared_intermediate_size": 24,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_expand": 2,
        "mamba_d_state": 8,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "ernie4_5_moe": {**_SIZES, "moe_num_experts": EXPERTS, "moe_k": TOP_K, "moe_num_shared_experts": 1},
    "hy_v3": {**_SIZES, **_NUMBER},
    "afmoe": {**_SIZES, **_NUMBER},
    "laguna": {**_SIZES, **_NUMBER},
    "lfm2_moe": {
        **_SIZES,
        **_NUMBER,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "jamba": {
        **_SIZES,
        **_NUMBER,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "hunyuan_v1_moe": {**_SIZES, **_NUMBER, "moe_topk": TOP_K},
    "nemotron_h": {
        **_SIZES,
        **_ROUTED,
        "n_group": 1,
        "topk_group": 1,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 24,
    },
    "llama4_text": {**_SIZES, **_LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
    "switch_transformers": {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2,
        "num_heads": 4,
        "num_experts": EXPERTS,
        "expert_capacity": 64,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 0,
    },
}
"""Model type -> what differs from transformers' defaults."""
