"""OLMoE: Llama's layout with norms of all queries and of all keys, every FFN a mixture of experts (2409.02060)."""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.classes import decoder_classes
from prunecli.architectures.common import gated_ffn, llama_stack, matrix, rms_norm
from prunecli.architectures.llama import LLAMA
from prunecli.architectures.mixtures import EXPERTS_ONLY
from prunecli.architectures.records import HeadAxis, TokenEmbedding

_STACK = llama_stack(dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "attention_bias"))
(_ATTENTION,) = _STACK.attentions
_NORMS = {
    "q_norm": "num_attention_heads*head_dim",
    "k_norm": "num_key_value_heads*head_dim",
}

OLMOE = replace(
    LLAMA,
    model_type="olmoe",
    model_class="OlmoeForCausalLM",
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
                tensors=gated_ffn(("gate_proj", "up_proj", "down_proj"), "intermediate_size"),
                router=(matrix("gate", "hidden_size", "expert_count", "router"),),
                sparse_step="1",
            ),
        ),
    ),
    # One norm takes the mean over all heads: without some of them it is another one, whatever config.json says.
    head_counts=(),
    head_width=None,
    heads_divide=None,
    mixture=EXPERTS_ONLY["olmoe"].mixture,
    attributes={
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": "num_attention_heads",
        "head_dim": "hidden_size/num_attention_heads",
        "num_local_experts": 64,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("OlmoeForCausalLM",), apart=True),
)
