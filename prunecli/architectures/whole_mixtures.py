"""The mixtures of experts of which all parts are declared, not the experts alone: Mixtral, Qwen3-MoE and OLMoE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prunecli.architectures.classes import decoder_classes
from prunecli.architectures.llama import ATTENTION_BIASES, MISTRAL, QWEN3, like_llama, llama_stack
from prunecli.architectures.mixtures import BLOCK_SPARSE, LANGUAGE_MODEL
from prunecli.architectures.records import HeadAxis, TensorSpec, matrix, rms_norm


def _gated_ffn(names: Sequence[str], width: str) -> tuple[TensorSpec, ...]:
    """Gate, up and down projection without a bias, of these names."""
    gate, up, down = names
    return (
        matrix(gate, "hidden_size", width, "ffn", hidden=0),
        matrix(up, "hidden_size", width, "ffn", hidden=0),
        matrix(down, width, "hidden_size", "ffn", hidden=1),
    )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ROUTER = (matrix("gate", "hidden_size", "expert_count", "router"),)
(_MISTRAL,), (_QWEN3,) = MISTRAL.stacks, QWEN3.stacks

# 2401.04088
MIXTRAL = like_llama(
    "mixtral",
    "Mixtral",
    MISTRAL,
    stacks=(
        replace(
            _MISTRAL,
            ffn=replace(
                _MISTRAL.ffn,
                name="block_sparse_moe",
                tensors=_gated_ffn(("w1", "w3", "w2"), "intermediate_size"),
                router=_ROUTER,
                sparse_step="1",
                module="mlp",
            ),
        ),
    ),
    mixture=replace(BLOCK_SPARSE, default_top_k=2),
    attributes={**MISTRAL.attributes, "num_local_experts": 8},
)

# 2505.09388. Sparse layers but for those that config.json names.
QWEN3_MOE = like_llama(
    "qwen3_moe",
    "Qwen3Moe",
    QWEN3,
    stacks=(
        replace(
            _QWEN3,
            ffn=replace(
                _QWEN3.ffn,
                router=_ROUTER,
                expert=_gated_ffn(_PROJECTIONS, "moe_intermediate_size"),
                expert_width="moe_intermediate_size",
                sparse_step="decoder_sparse_step",
                dense_layers="mlp_only_layers",
            ),
        ),
    ),
    mixture=replace(LANGUAGE_MODEL, default_top_k=8),
    attributes={
        **MISTRAL.attributes,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "decoder_sparse_step": 1,
        "attention_bias": False,
    },
    window_start=None,
)

_STACK = llama_stack(ATTENTION_BIASES)
(_ATTENTION,) = _STACK.attentions
_NORMS = {
    "q_norm": "num_attention_heads*head_dim",
    "k_norm": "num_key_value_heads*head_dim",
}

# 2409.02060. Norms of all queries and of all keys.
OLMOE = like_llama(
    "olmoe",
    "Olmoe",
    classes=decoder_classes("Olmoe")[:2],
    stacks=(
        replace(
            _STACK,
            attentions=(
                replace(
                    _ATTENTION,
                    tensors=(
                        *_ATTENTION.tensors,
                        *(
                            replace(rms_norm(f"self_attn.{name}", width), part="attention", heads=HeadAxis(0))
                            for name, width in _NORMS.items()
                        ),
                    ),
                ),
            ),
            ffn=replace(
                _STACK.ffn,
                tensors=_gated_ffn(_PROJECTIONS, "intermediate_size"),
                router=_ROUTER,
                sparse_step="1",
            ),
        ),
    ),
    # One norm takes the mean over all heads: without some of them it is another one, whatever config.json says.
    head_counts=(),
    head_width=None,
    heads_divide=None,
    mixture=replace(LANGUAGE_MODEL, default_top_k=8),
    attributes={
        **MISTRAL.attributes,
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": "num_attention_heads",
        "num_local_experts": 64,
        "attention_bias": False,
    },
)
