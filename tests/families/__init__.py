"""Real tiny checkpoints of every declared family (`records.py`), written in milliseconds. See also `tests.tiny`."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.records import CASES, FAMILIES
from tests.tiny import (
    CONFIG_DTYPES,
    NUMPY_DTYPES,
    VOCAB,
    tiny_nllb_moe,
    write_json,
    write_plain_tokenizer,
    write_tokenizer,
    write_weights,
)

MODEL_TYPES = tuple(name for name in FAMILIES if name != "nllb-moe")
"""Every family whose tiny model is `tiny_family`'s; see also `tests.tiny`."""
TRANSLATORS = tuple(name for name in MODEL_TYPES if FAMILIES[name].task == "translation")
ENCODERS = tuple(name for name in MODEL_TYPES if FAMILIES[name].task == "mlm")
DECODERS = tuple(name for name in MODEL_TYPES if FAMILIES[name].task == "lm")


def tiny_config_of(case: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model of one of `CASES`.

    `num_labels` among the changes becomes what config.json holds for it.
    """
    family = CASES[case]
    config = {
        "model_type": family.model_type,
        "vocab_size": VOCAB,
        "dtype": "float32",
        "transformers_version": "5.23.0",
        **family.config,
        **changes,
    }
    if (labels := config.pop("num_labels", None)) is not None:
        config["id2label"] = {str(index): f"LABEL_{index}" for index in range(labels)}
        config["label2id"] = {f"LABEL_{index}": index for index in range(labels)}
    return config


def tiny_family(
    directory: Path | str, case: str, *, dtype: str = "F32", seed: int = 0, **config_changes: Any
) -> Path:
    """A checkpoint directory of one of `CASES`, of the class that `architectures` names.

    `dtype` is F32, F16 or BF16. m2m_100 and mbart get an NllbTokenizer (deu_Latn, eng_Latn, fra_Latn), the
    others `write_plain_tokenizer`'s; <s>, <pad>, </s>, <unk> are 0 to 3 in both.
    """
    directory, family = Path(directory), CASES[case]
    if case == "nllb-moe":
        heads = {key: value for key, value in family.config.items() if key.endswith("_attention_heads")}
        return tiny_nllb_moe(directory, dtype=dtype, seed=seed, config={**heads, **config_changes})
    directory.mkdir(parents=True, exist_ok=True)
    if family.model_type in ("m2m_100", "mbart"):
        size = write_tokenizer(directory)
    else:
        size = write_plain_tokenizer(
            directory, family.template, begins="</s>" if family.model_type == "gpt2" else "<s>"
        )
    changes = {"vocab_size": size, "dtype": CONFIG_DTYPES[dtype], **config_changes}
    config = tiny_config_of(case, **changes)
    write_json(directory / "config.json", config)
    if family.task != "mlm":
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


def full_and_pruned(folder: Path, case: str, **changes: Any) -> dict[str, Path]:
    """Two checkpoints of a case, of other weights, by these names."""
    seeds = enumerate(("full", "pruned"))
    return {name: tiny_family(folder / case / name, case, seed=seed, **changes) for seed, name in seeds}


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
