"""Llama 1 to 3 and models in its layout; a key/value head goes with all the query heads that share it."""

from __future__ import annotations

from prunecli.architectures.common import embeddings, llama_stack, rms_norm
from prunecli.architectures.records import Architecture, TokenEmbedding

BIASES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "attention_bias"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp_bias"),
}

LLAMA = Architecture(
    model_type="llama",
    model_class="LlamaForCausalLM",
    auto_class="AutoModelForCausalLM",
    stacks=(llama_stack(BIASES),),
    tensors=(
        embeddings("model.embed_tokens", "vocab_size", "hidden_size"),
        rms_norm("model.norm", "hidden_size"),
    ),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    loose=("lm_head.weight",),
    extras=("lm_head.", "score."),
    buffers=("rotary_emb.inv_freq", "rotary_emb.original_inv_freq"),
    head_counts=("num_attention_heads", "num_key_value_heads"),
    head_width="head_dim",
    head_quotient="hidden_size/num_attention_heads",
    attributes={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": "num_attention_heads",
        "head_dim": "hidden_size/num_attention_heads",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("LlamaForCausalLM",), apart=True),
)
