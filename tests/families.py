"""Real tiny checkpoints of every declared family but NLLB-MoE, written in milliseconds. See also `tests.tiny`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny import (
    CONFIG_DTYPES,
    MERGES,
    NUMPY_DTYPES,
    PIECES,
    SPECIALS,
    write_json,
    write_tokenizer,
    write_weights,
)

TRANSLATORS = ("m2m_100", "marian", "pegasus", "bart", "mbart", "t5", "mt5")
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert")
DECODERS = ("gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
MODEL_TYPES = (*TRANSLATORS, *ENCODERS, *DECODERS)

LAYOUT_OF = {
    "mbart": "bart",
    "pegasus": "bart",
    "marian": "bart",
    "m2m_100": "bart",
    "mt5": "t5",
    "xlm-roberta": "roberta",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "gemma2": "llama",
    "gemma3_text": "llama",
}
"""Families whose tensors lie as those of another: what does not depend on names and shapes is tested on that one."""

LAYOUTS = tuple(name for name in MODEL_TYPES if name not in LAYOUT_OF)

NARROW_OPT: dict[str, Any] = {"word_embed_proj_dim": 24, "do_layer_norm_before": False}
"""Changes that give the tiny OPT embeddings narrower than its layers, and norms after them, as OPT-350M has."""

GATED_T5: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
"""Changes that make the tiny T5 one of version 1.1: gated FFNs, an output matrix of its own."""

TIED_LLAMA: dict[str, Any] = {"tie_word_embeddings": True}

VOCAB = len(SPECIALS) + len(PIECES) + len(MERGES) + 1
"""Tokens of `write_plain_tokenizer`: the last special token is <mask>."""

_IDS: dict[str, Any] = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}

_SEQ2SEQ: dict[str, Any] = {
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
    "tie_word_embeddings": True,
    **_IDS,
}

_T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 1,
    "is_encoder_decoder": True,
    **_IDS,
}

_BERT: dict[str, Any] = {
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
}

_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    **_IDS,
}

_GEMMA: dict[str, Any] = {
    **{key: value for key, value in _LLAMA.items() if key != "hidden_act"},
    "head_dim": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "m2m_100": {**_SEQ2SEQ, "architectures": ["M2M100ForConditionalGeneration"]},
    "marian": {
        **_SEQ2SEQ,
        "architectures": ["MarianMTModel"],
        "decoder_start_token_id": 1,
        "forced_eos_token_id": 2,
        "share_encoder_decoder_embeddings": True,
    },
    "pegasus": {
        **_SEQ2SEQ,
        "architectures": ["PegasusForConditionalGeneration"],
        "activation_function": "relu",
        "decoder_start_token_id": 1,
        "forced_eos_token_id": 2,
    },
    "bart": {**_SEQ2SEQ, "architectures": ["BartForConditionalGeneration"], "forced_eos_token_id": 2},
    "mbart": {**_SEQ2SEQ, "architectures": ["MBartForConditionalGeneration"], "forced_eos_token_id": 2},
    "t5": {
        **_T5,
        "architectures": ["T5ForConditionalGeneration"],
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    },
    "mt5": {
        **_T5,
        "architectures": ["MT5ForConditionalGeneration"],
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "bert": {**_BERT, "architectures": ["BertForMaskedLM"]},
    "roberta": {**_BERT, "architectures": ["RobertaForMaskedLM"], "type_vocab_size": 1},
    "xlm-roberta": {**_BERT, "architectures": ["XLMRobertaForMaskedLM"], "type_vocab_size": 1},
    "distilbert": {
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
    "opt": {
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
    "gpt2": {
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
    "llama": {**_LLAMA, "architectures": ["LlamaForCausalLM"]},
    "mistral": {**_LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {**_LLAMA, "architectures": ["Qwen2ForCausalLM"]},
    "phi3": {**_LLAMA, "architectures": ["Phi3ForCausalLM"]},
    "gemma2": {**_GEMMA, "architectures": ["Gemma2ForCausalLM"]},
    "gemma3_text": {**_GEMMA, "architectures": ["Gemma3ForCausalLM"]},
    "qwen3": {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 6},
}


def tiny_config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model: 2 or 3 layers of 4 heads (Llama's kin: 8 query heads on 4 key/value heads).

    `num_labels` among the changes becomes what config.json holds for it.
    """
    config = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "dtype": "float32",
        "transformers_version": "5.23.0",
        **_CONFIGS[model_type],
        **changes,
    }
    if (labels := config.pop("num_labels", None)) is not None:
        config["id2label"] = {str(index): f"LABEL_{index}" for index in range(labels)}
        config["label2id"] = {f"LABEL_{index}": index for index in range(labels)}
    return config


def tiny_family(
    directory: Path | str, model_type: str, *, dtype: str = "F32", seed: int = 0, **config_changes: Any
) -> Path:
    """A checkpoint directory in the stock layout, of the class that `architectures` names.

    `dtype` is F32, F16 or BF16. m2m_100 and mbart get an NllbTokenizer (deu_Latn, eng_Latn, fra_Latn), the
    others `write_plain_tokenizer`'s; <s>, <pad>, </s>, <unk> are 0 to 3 in both.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if model_type in ("m2m_100", "mbart"):
        size = write_tokenizer(directory)
    else:
        size = write_plain_tokenizer(directory, model_type)
    changes = {"vocab_size": size, "dtype": CONFIG_DTYPES[dtype], **config_changes}
    config = tiny_config_of(model_type, **changes)
    write_json(directory / "config.json", config)
    if model_type not in ENCODERS:
        keys = (
            "bos_token_id",
            "decoder_start_token_id",
            "eos_token_id",
            "forced_eos_token_id",
            "pad_token_id",
        )
        generation = {key: config[key] for key in keys if key in config}
        write_json(directory / "generation_config.json", {**generation, "max_length": 32})
    write_weights(directory, random_state(config, seed, dtype))
    return directory


def random_state(config: dict[str, Any], seed: int = 0, dtype: str = "F32") -> dict[str, np.ndarray]:
    """Every tensor that the stock class of `config` stores, with random values.

    Projections keep the scale of what goes through them, so each head matters; norms lie near the identity,
    biases are not zero.
    """
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in stored_shapes(json.dumps(config, sort_keys=True)).items():
        values = generator.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            values *= np.float32(0.1)
            if name.endswith("weight") and not config["model_type"].startswith("gemma"):  # its norms add 1
                values += 1
        elif "relative_attention_bias" not in name and name != "final_logits_bias":
            inputs = shape[0] if ".c_" in name else shape[-1]  # GPT-2 stores [in, out]
            values *= np.float32(1 / np.sqrt(inputs))
        tensors[name] = np.ascontiguousarray(values.astype(NUMPY_DTYPES[dtype]))
    return tensors


@functools.cache
def stored_shapes(config: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what `save_pretrained` stores of a model of this config, given as JSON; asks transformers."""
    model = stock_model(json.loads(config))
    left_out = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    # Frozen ones are computed.
    left_out |= {name for name, held in model.named_parameters() if not held.requires_grad}
    if model.config.model_type in ("t5", "mt5") and not json.loads(config)["tie_word_embeddings"]:
        left_out.discard(
            "lm_head.weight"
        )  # T5 ties it at its making, and unties it where the two values differ
    return {name: tuple(held.shape) for name, held in model.state_dict().items() if name not in left_out}


def stock_model(config: dict[str, Any]) -> Any:
    """The class of transformers that config["architectures"] names, on the meta device."""
    import torch
    import transformers

    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        return getattr(transformers, config["architectures"][0])(made)


_TEMPLATES = {
    "bert": ("<s> $A </s>", "<s>:0 $A:0 </s>:0 $B:1 </s>:1"),
    "distilbert": ("<s> $A </s>", "<s> $A </s> $B </s>"),
    "roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "xlm-roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "bart": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "marian": ("$A </s>", "$A $B </s>"),
    "pegasus": ("$A </s>", "$A $B </s>"),
    **dict.fromkeys(("t5", "mt5"), ("$A </s>", "$A </s> $B </s>")),
    "opt": ("</s> $A", "</s> $A $B"),
    **dict.fromkeys(("llama", "mistral", "gemma2", "gemma3_text"), ("<s> $A", "<s> $A $B")),
}


def write_plain_tokenizer(directory: Path, model_type: str) -> int:
    """Write the files of a tokenizer over letters and a few merges; returns its number of tokens.

    <s>, <pad>, </s>, <unk> and <mask> are its special tokens; which of them stand around a text is as the family
    has it.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE

    pieces = (*SPECIALS, *PIECES, *("".join(merge) for merge in MERGES))
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=list(MERGES), unk_token="<unk>", fuse_unk=True))
    metaspace = {"replacement": "\u2581", "prepend_scheme": "always", "split": True}
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**metaspace)
    tokenizer.decoder = decoders.Metaspace(**metaspace)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=True, special=True)])
    if model_type in _TEMPLATES:
        single, pair = _TEMPLATES[model_type]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "bos_token": "</s>" if model_type == "gpt2" else "<s>",
            "cls_token": "<s>",
            "eos_token": "</s>",
            "mask_token": "<mask>",
            "model_max_length": 64,
            "pad_token": "<pad>",
            "sep_token": "</s>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
        },
    )
    return int(tokenizer.get_vocab_size())
