"""Tiny mixture-of-experts language models of transformers' own classes, with random weights."""

from __future__ import annotations

from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 8}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 24},
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3", _LATENT | {"n_group": 2, "topk_group": 1}),
    "deepseek_v2": ("DeepseekV2", _LATENT | {"topk_method": "greedy"}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "num_hidden_layers": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "moe_shared_expert_intermediate_size": 24,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "head_dim": 8,
        },
    ),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_k": 3, "moe_layer_start_index": 1}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8}),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_dense_layers": 1,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "jamba": (
        "Jamba",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "head_dim": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
"""model_type -> prefix of the classes' names, and what config.json has beside the usual sizes."""


def tiny_mixture(model_type: str, *, seed: int = 0, **config: Any) -> Any:
    """A model in float32, in evaluation mode; every parameter random, biases and correction biases included."""
    import transformers

    prefix, values = CLASSES[model_type]
    made = getattr(transformers, f"{prefix}Config")(**(_SIZES | values | config))
    model = getattr(transformers, f"{prefix}ForCausalLM")(made).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" not in name and "correction" not in name and tensor.is_floating_point():
                if "inv_freq" not in name and "A_log" not in name:
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
            elif "correction" in name:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.1)
    return model
