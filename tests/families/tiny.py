"""Tiny random models of every text model type that the installed transformers names, made by rule.

The rules read the fields of transformers' own config classes: each size becomes small, each list with an
entry for every layer keeps the first layer of each kind. `OVERRIDES` holds what the rules get wrong.
"""

import dataclasses
import functools
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

HEADS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
"""Head -> model type -> class name, as transformers' auto classes map them."""
LAYERS = 3
VOCAB = 99
FIRST_SPECIAL = 90
"""Special token ids that do not fit the tiny vocabulary become ids from here on."""
LENGTH = 12
"""Tokens in each row of `inputs`: more than an attention window or a chunk of a recurrence."""

_NAMES = {
    LAYERS: "num_hidden_layers n_layer n_layers num_layers encoder_layers num_encoder_layers",
    LAYERS + 1: "decoder_layers num_decoder_layers",
    1: "first_k_dense_replace num_dense_layers num_mtp_layers num_nextn_predict_layers topk_group"
    " attn_layer_offset num_kv_shared_layers num_codebooks",
    2: "num_key_value_heads num_experts_per_tok moe_topk moe_k top_k_experts n_group"
    " linear_num_key_heads index_topk_blocks mamba_n_groups n_groups decoder_sparse_step"
    " encoder_sparse_step attn_layer_period",
    4: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads"
    " decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"
    " swa_num_attention_heads swa_num_key_value_heads linear_num_value_heads linear_num_heads"
    " index_n_heads",
    8: "num_experts num_local_experts n_routed_experts moe_num_experts mamba_n_heads mamba_num_heads"
    " sliding_window attention_window window_size local_attention sliding_window_size"
    " attention_window_size attention_chunk_size chunk_size mamba_chunk_size rotary_dim index_topk"
    " linear_key_head_dim qk_nope_head_dim",
    6: "linear_value_head_dim qk_rope_head_dim",
    12: "mamba_head_dim mamba_d_head v_head_dim",
    10: "linear_head_dim mamba_d_state state_size ssm_state_size",
    14: "moe_latent_size",
    16: "head_dim index_head_dim d_kv d_head attention_head_size kv_channels dim_head swa_head_dim",
    20: "q_lora_rank",
    24: "kv_lora_rank",
    28: "moe_intermediate_size expert_ffn_hidden_size",
    36: "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size"
    " shared_experts_intermediate_size",
    32: "embedding_size",
    48: "adapter_in_dim adapter_out_dim adapter_input_size hidden_size d_model n_embd dim emb_dim",
    64: "max_position_embeddings n_positions n_ctx context_length max_seq_len max_source_positions"
    " max_target_positions max_encoder_position_embeddings max_decoder_position_embeddings",
    80: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim dff dim_ff n_inner"
    " d_inner ffn_hidden_size feed_forward_size",
    88: "intermediate_size_mlp dense_intermediate_size",
    96: "mamba_d_ssm",
    VOCAB: "entity_vocab_size encoder_hash_byte_group_vocab pronunciation_vocab_size shape_vocab_size"
    " vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size decoder_vocab_size",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
ALWAYS = ("num_key_value_heads",)
"""Sizes that are set although the class's default is None. Other sizes that follow from others stay so."""
_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
OVERRIDES = {
    # Without attention by default; a cache without an attention layer cannot be asked for its length.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": _MIXED},
    # The class reads head_dim, which the default config leaves None.
    "hunyuan_v1_dense": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    # As many key/value heads as heads; 64 tokens by default.
    "esmc": {"num_key_value_heads": 4, "vocab_size": VOCAB},
    # heads x head_dim must be the hidden size.
    "helium": {"head_dim": 12},
    "squeezebert": {"embedding_size": 48},
    "reformer": {"axial_pos_embds_dim": (16, 32), "axial_pos_shape": (8, 8)},
    # heads x head_dim must be expand x hidden size.
    "mamba2": {"head_dim": 24},
    # The rotary embedding takes head_dim, the attention qk_rope_head_dim.
    "longcat_flash": {"head_dim": 6},
    # A quarter of the head width is rotated: it must be even.
    "stablelm": {"hidden_size": 64},
    # Its expert counts are None by default, and the class needs them.
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    # Its vocabulary and padding id are None by default.
    "esm": {"vocab_size": 99, "pad_token_id": 1, "mask_token_id": 4},
    # The class reads a rope_theta that the nested config does not declare, and clamps to None.
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    # Without experts by default.
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 28,
    },
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    # Top-k is None by default.
    "deepseek_v2": {"num_experts_per_tok": 2},
    # heads x head width must be mamba_d_ssm.
    "falcon_h1": {"mamba_d_head": 12},
    # The decoder reads the width of the global transformer from its own config.
    "blt": {"decoder_config": {"hidden_size_global": 48}},
    # Hundreds of millions of parameters beside the text model.
    "vibevoice_asr": {
        "semantic_tokenizer_encoder_config": {"num_filters": 2},
        "acoustic_tokenizer_encoder_config": {"num_filters": 2},
    },
    "perceiver": {"d_latents": 32, "num_self_attends_per_block": 3, "num_latents": 16},
    # A compressed list of kinds, whose counts must add up to the number of layers.
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    # By default only attention, or no list at all.
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    # The indexer's sizes are None by default, and the class divides them.
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    # The adapter of a language is chosen by the config.
    "xmod": {"default_language": "en_XX"},
    # The first of at least two hybrid layers holds the shared weights, and must be layer 2.
    "zamba": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 4,
    },
    # The default has no rope parameters for the only kind of layer.
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
}
CANNOT = {
    "gemma3n": "its vision tower needs timm (gemma3n_text is built)",
    "gemma4_assistant": "a drafter: it reads the keys and values of another model",
    "gemma4_unified_assistant": "a drafter: it reads the keys and values of another model",
    "nemo_speechlm": "its audio part has sizes that no rule here fits together",
    "voxtral_realtime": "it takes audio with every token",
}
"""Types that cannot be built from their config and run on token ids, with the reason."""


def model_types() -> list[str]:
    """All text model types with a causal, a sequence-to-sequence or a masked class that can be built."""
    return sorted(set().union(*HEADS.values()) - set(CANNOT))


def heads(model_type: str) -> list[str]:
    """The keys of `HEADS` that name a class for this type: causal first, then seq2seq, then masked."""
    return [head for head, names in HEADS.items() if model_type in names]


def auto_class(model_type: str, head: str | None = None) -> type[PreTrainedModel]:
    """The class that transformers' auto class of this head builds. Default: the first of `heads`."""
    return getattr(transformers, HEADS[head or heads(model_type)[0]][model_type])


def tiny_config(model_type: str, head: str | None = None) -> PreTrainedConfig:
    """The tiny config of this type, as the class of this head takes it (the text part of a composite one)."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    values = _values(config_class())
    for name, value in OVERRIDES.get(model_type, {}).items():
        values[name] = {**values[name], **value} if name in config_class.sub_configs else value
    config = config_class(**values)
    model_class = auto_class(model_type, head)
    if (head or heads(model_type)[0]) == "causal" and "masked" in heads(model_type):
        config.is_decoder = True
    parts = [name for name, part in config.sub_configs.items() if part is model_class.config_class]
    return getattr(config, parts[0]) if parts else config


def values_of(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The tiny values for a config of this class."""
    return _values(config_class())


@functools.cache
def _fields(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Name -> default of the fields that the class adds to `PreTrainedConfig`."""
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {f.name: f.default for f in dataclasses.fields(config_class) if f.name not in common}


def _values(default: PreTrainedConfig) -> dict[str, Any]:
    """Tiny values for the fields of a config and its nested configs, given an instance of defaults."""
    values = {"dtype": "float32"}
    special = FIRST_SPECIAL
    for name, declared in _fields(type(default)).items():
        value = vars(default).get(name, declared)
        if isinstance(value, PreTrainedConfig):
            values[name] = {"model_type": value.model_type, **_values(value)}
        elif name in SIZES and (declared is not None or name in ALWAYS):
            values[name] = min(SIZES[name], value) if isinstance(value, int) else SIZES[name]
        elif "dropout" in name or name.endswith(("_pdrop", "layerdrop")):
            values[name] = value if value is None or isinstance(value, bool) else type(value)(0)
        elif (
            name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= FIRST_SPECIAL
        ):
            values[name] = special
            special += 1
    if "kv_lora_rank" in values:  # latent attention: every head has keys of its own
        values["num_key_value_heads"] = values["num_attention_heads"]
    return {**values, **_lists(default)}


def _lists(default: PreTrainedConfig) -> dict[str, Any]:
    """The lists with an entry for every layer, cut to the first layer of each kind, and their length."""
    depth = vars(default).get("num_hidden_layers")
    lists = {
        name: list(value)
        for name in _fields(type(default))
        if name not in SIZES and isinstance(value := vars(default).get(name), list) and len(value) == depth
    }
    indices = [name for name, value in lists.items() if value == list(range(len(value)))]
    kinds = [repr(kind) for kind in zip(*(lists[name] for name in lists if name not in indices), strict=True)]
    if not kinds:
        return {}
    kept = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]
    kept += [layer for layer in range(len(kinds)) if layer not in kept][: max(0, LAYERS - len(kept))]
    cut = {name: [value[layer] for layer in sorted(kept)] for name, value in lists.items()}
    return {**cut, **{name: list(range(len(kept))) for name in indices}, "num_hidden_layers": len(kept)}


def build(model_type: str, seed: int = 0, head: str | None = None) -> PreTrainedModel:
    """A model in evaluation mode, float32, whose random weights make the logits vary."""
    return drawn(auto_class(model_type, head), tiny_config(model_type, head), seed)


def drawn(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model as `build` makes them, of this class and config."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape)
            if weight.dim() > 1 and "A_log" not in name:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            else:  # norms, biases, decays: near what the class starts with
                weight.add_(noise * 0.1)
    return model


def inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Two rows of token ids without padding and, for a sequence-to-sequence model, the decoder's."""
    generator = torch.Generator().manual_seed(1)
    most = min(FIRST_SPECIAL, getattr(model.config, "vocab_size", FIRST_SPECIAL))
    rows = {"input_ids": torch.randint(10, most, (2, LENGTH), generator=generator)}
    if model.main_input_name == "input_features":
        size = model.config.num_mel_bins, 2 * model.config.max_source_positions
        rows = {"input_features": torch.randn(2, *size, generator=generator)}
    if model.config.is_encoder_decoder:
        rows["decoder_input_ids"] = torch.randint(10, most, (2, LENGTH - 3), generator=generator)
    return rows
