"""What the tests know of each family, one record apiece: a new family is one more in `FAMILIES`.

Lists of families, tiny checkpoints (`tests.families`), layouts and masks are all derived from the records.
"""

from collections.abc import Iterable
from dataclasses import replace

from tests.families.family import Family, FfnLayout
from tests.tiny import VOCAB, tiny_config

_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
_STACKS = (("encoder", 3), ("decoder", 2))
_SENTENCE = "<s> $A </s>"
_BEGUN = ("<s> $A", "<s> $A $B")
_ENDED = ("$A </s>", "$A $B </s>")
_TWO_BREAKS = (_SENTENCE, "<s> $A </s> </s> $B </s>")

_BART_FFN = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1, "fc2.bias": None}
_BART_LAYERS = [f"model.{side}.layers.{n}" for side, depth in _STACKS for n in range(depth)]

NLLB_MOE = Family(
    "nllb-moe",
    "translation",
    {
        **tiny_config(experts=8, d_model=16, ffn=32, layers=4, sparse_step=2, vocab=VOCAB + 3),
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
    FfnLayout(  # the dense ones; layers 1 and 3 are sparse
        {
            f"model.{side}.layers.{n}.ffn": f"model.{side}.layers.{n}.ff_layer_norm"
            for side, _ in _STACKS
            for n in (0, 2)
        },
        _BART_FFN,
        ("encoder_ffn_dim", "decoder_ffn_dim"),
    ),
    input=("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"),
    output="lm_head",
    norms=("self_attn_layer_norm", "cross_attention_layer_norm", "ff_layer_norm"),
    float32_parts=True,
)

M2M_100 = Family(
    "m2m_100",
    "translation",
    {
        "architectures": ["M2M100ForConditionalGeneration"],
        "d_model": 32,
        "encoder_layers": 3,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 40,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "decoder_start_token_id": 2,
        "is_encoder_decoder": True,
        "scale_embedding": True,
        "tie_word_embeddings": True,
        **_IDS,
    },
    FfnLayout(
        {layer: f"{layer}.final_layer_norm" for layer in _BART_LAYERS},
        _BART_FFN,
        ("encoder_ffn_dim", "decoder_ffn_dim"),
    ),
    input=NLLB_MOE.input,
    output="lm_head",
    norms=("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
    layout_of="bart",
)
_FORCED = {"forced_eos_token_id": 2}
_MARIAN = {**_FORCED, "decoder_start_token_id": 1, "share_encoder_decoder_embeddings": True}
_PEGASUS = {**_FORCED, "decoder_start_token_id": 1, "activation_function": "relu"}
_POST_NORM = replace(M2M_100.ffns, post_norm=True)

T5 = Family(
    "t5",
    "translation",
    {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 32,
        "d_kv": 6,
        "d_ff": 48,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "dropout_rate": 0.0,
        "feed_forward_proj": "relu",
        "decoder_start_token_id": 1,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        **_IDS,
    },
    FfnLayout(
        {
            f"{side}.block.{n}.layer.{part}.DenseReluDense": f"{side}.block.{n}.layer.{part}.layer_norm"
            for (side, depth), part in zip(_STACKS, (1, 2), strict=True)
            for n in range(depth)
        },
        {"wi.weight": 0, "wo.weight": 1},
        ("d_ff",),
    ),
    input=("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
    output="lm_head",
    norms=("layer.0.layer_norm", "layer.1.layer_norm", "layer.2.layer_norm"),
    template=("$A </s>", "$A </s> $B </s>"),
    float32_parts=True,
)
_GATED_T5_FFNS = replace(T5.ffns, tensors={"wi_0.weight": 0, "wi_1.weight": 0, "wo.weight": 1})
_GATED_T5 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def _bert_ffns(model: str) -> FfnLayout:
    return FfnLayout(
        {f"{model}.encoder.layer.{n}": f"{model}.encoder.layer.{n}.output.LayerNorm" for n in range(3)},
        {
            "intermediate.dense.weight": 0,
            "intermediate.dense.bias": 0,
            "output.dense.weight": 1,
            "output.dense.bias": None,
        },
        ("intermediate_size",),
        post_norm=True,
    )


BERT = Family(
    "bert",
    "mlm",
    {
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 66,
        "type_vocab_size": 2,
        **_IDS,
    },
    _bert_ffns("bert"),
    input=("bert.embeddings.word_embeddings",),
    output="cls.predictions.decoder",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    template=(_SENTENCE, "<s>:0 $A:0 </s>:0 $B:1 </s>:1"),
)
ROBERTA = Family(
    "roberta",
    "mlm",
    {**BERT.config, "architectures": ["RobertaForMaskedLM"], "type_vocab_size": 1},
    _bert_ffns("roberta"),
    input=("roberta.embeddings.word_embeddings",),
    output="lm_head.decoder",
    norms=BERT.norms,
    template=_TWO_BREAKS,
)
DISTILBERT = Family(
    "distilbert",
    "mlm",
    {
        "architectures": ["DistilBertForMaskedLM"],
        "dim": 32,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 48,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "max_position_embeddings": 66,
        **_IDS,
    },
    FfnLayout(
        {
            f"distilbert.transformer.layer.{n}.ffn": f"distilbert.transformer.layer.{n}.output_layer_norm"
            for n in range(3)
        },
        {"lin1.weight": 0, "lin1.bias": 0, "lin2.weight": 1, "lin2.bias": None},
        ("hidden_dim",),
        post_norm=True,
    ),
    input=("distilbert.embeddings.word_embeddings",),
    output="vocab_projector",
    norms=("sa_layer_norm", "output_layer_norm"),
    template=(_SENTENCE, "<s> $A </s> $B </s>"),
)

GPT2 = Family(
    "gpt2",
    "lm",
    {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": None,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **_IDS,
        "bos_token_id": 2,
    },
    FfnLayout(
        {f"transformer.h.{n}.mlp": f"transformer.h.{n}.ln_2" for n in range(3)},
        {"c_fc.weight": 1, "c_fc.bias": 0, "c_proj.weight": 0, "c_proj.bias": None},
        ("n_inner",),
    ),
    input=("transformer.wte",),
    output="lm_head",
    norms=("ln_1", "ln_2"),
)
OPT = Family(
    "opt",
    "lm",
    {
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        **_IDS,
        "bos_token_id": 2,
    },
    FfnLayout(
        {f"model.decoder.layers.{n}": f"model.decoder.layers.{n}.final_layer_norm" for n in range(3)},
        _BART_FFN,
        ("ffn_dim",),
    ),
    input=("model.decoder.embed_tokens",),
    output="lm_head",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    template=("</s> $A", "</s> $A $B"),
)
LLAMA = Family(
    "llama",
    "lm",
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        **_IDS,
    },
    FfnLayout(
        {f"model.layers.{n}.mlp": f"model.layers.{n}.post_attention_layernorm" for n in range(3)},
        {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1},
        ("intermediate_size",),
    ),
    input=("model.embed_tokens",),
    output="lm_head",
    norms=("input_layernorm", "post_attention_layernorm"),
    template=_BEGUN,
    float32_parts=True,
)
GEMMA2 = LLAMA.kin(
    "gemma2",
    "Gemma2ForCausalLM",
    {
        "head_dim": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
    ffns=replace(
        LLAMA.ffns,
        names={f"model.layers.{n}.mlp": f"model.layers.{n}.pre_feedforward_layernorm" for n in range(3)},
    ),
    norms=("input_layernorm", "pre_feedforward_layernorm"),
)
FAMILIES = {
    family.model_type: family
    for family in (
        NLLB_MOE,
        M2M_100,
        M2M_100.kin("marian", "MarianMTModel", _MARIAN, ffns=_POST_NORM, template=_ENDED),
        M2M_100.kin("pegasus", "PegasusForConditionalGeneration", _PEGASUS, template=_ENDED),
        M2M_100.kin(
            "bart",
            "BartForConditionalGeneration",
            {**_FORCED, "scale_embedding": False},
            layout_of="",
            ffns=_POST_NORM,
            template=_TWO_BREAKS,
        ),
        M2M_100.kin("mbart", "MBartForConditionalGeneration", _FORCED),
        T5,
        T5.kin("mt5", "MT5ForConditionalGeneration", _GATED_T5, ffns=_GATED_T5_FFNS),
        BERT,
        ROBERTA,
        ROBERTA.kin("xlm-roberta", "XLMRobertaForMaskedLM", {}),
        DISTILBERT,
        GPT2,
        OPT,
        LLAMA,
        LLAMA.kin("mistral", "MistralForCausalLM", {"sliding_window": None}),
        LLAMA.kin("qwen2", "Qwen2ForCausalLM", {}, template=None),
        LLAMA.kin("qwen3", "Qwen3ForCausalLM", {"head_dim": 6}, template=None),
        LLAMA.kin("smollm3", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}, template=None),
        GEMMA2,
        GEMMA2.kin("gemma3_text", "Gemma3ForCausalLM", {}),
        LLAMA.kin(  # gate and up are one tensor; so are query, key and value
            "phi3",
            "Phi3ForCausalLM",
            {},
            layout_of="",
            ffns=replace(LLAMA.ffns, tensors={"gate_up_proj.weight": 0, "down_proj.weight": 1}),
            template=None,
        ),
    )
}
"""Every declared family."""

CASES = {
    **FAMILIES,
    "t5-gated": T5.variant(_GATED_T5, ffns=_GATED_T5_FFNS),  # version 1.1
    "opt-narrow": OPT.variant({"word_embed_proj_dim": 24, "do_layer_norm_before": False}),  # as OPT-350M
    "llama-tied": LLAMA.variant({"tie_word_embeddings": True}),
    "bert-untied": BERT.variant({"tie_word_embeddings": False}),
    "bert-classifier": BERT.variant({"architectures": ["BertForSequenceClassification"], "num_labels": 3}),
}
"""And the variants of them whose tensors lie otherwise."""


DISTINCT = ("nllb-moe", "bart", "t5", "bert", "gpt2", "llama", "phi3")
"""Experts; two stacks with biases; relative positions and no biases; norms behind; one fused and transposed
projection; gates and shared keys; fused gates and queries. Every code path that depends on where tensors lie."""

BRANCHES = (*DISTINCT, "marian", "pegasus", "mt5", "roberta", "bert-untied", "opt", "opt-narrow", "gemma2")
"""And computed positions, gates beside relative positions, positions behind an offset, an output of its own,
projections beside the tables, two norms more."""


def own_layouts(cases: Iterable[str]) -> list[str]:
    """The cases whose tensors lie in different ways."""
    return [name for name in cases if name in DISTINCT]


def own_branches(cases: Iterable[str]) -> list[str]:
    """The cases that take different branches of the code."""
    return [name for name in cases if name in BRANCHES]
