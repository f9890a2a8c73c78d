"""A sentence-transformers model, in the layout in which all-MiniLM-L6-v2 and its kin are published."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.families import tiny_family
from tests.tiny import write_json

WIDTH = 32
"""Hidden size of the tiny BERT."""


def sentence_model(
    directory: Path | str, transformer: str = "", *, is_dense: bool = True, **changes: Any
) -> Path:
    """A tiny BERT without head, mean pooling, a dense layer with weights of its own, and normalisation.

    Args:
        changes: of its config.json.
        transformer: folder of the BERT; empty: it lies in `directory` itself.
        is_dense: whether the dense layer is one of the modules: its vectors are much alike.
    """
    directory = Path(directory)
    tiny_family(directory / transformer, "bert", **{"architectures": ["BertModel"], **changes})
    for folder in ("1_Pooling", "2_Dense"):
        (directory / folder).mkdir(exist_ok=True)
    modules = [
        (transformer, "Transformer"),
        ("1_Pooling", "Pooling"),
        *([("2_Dense", "Dense")] if is_dense else []),
        ("3_Normalize", "Normalize"),  # an empty folder, which no repository holds
    ]
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(entries, indent=2))
    tanh = "torch.nn.modules.activation.Tanh"
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    for name, value in {
        "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "2.0.0"}},
        f"{transformer or '.'}/sentence_bert_config.json": {"max_seq_length": 24, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": WIDTH, **modes},
        "2_Dense/config.json": {
            "in_features": WIDTH,
            "out_features": 8,
            "bias": True,
            "activation_function": tanh,
        },
    }.items():
        write_json(directory / name, value)
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(8, WIDTH)).astype(np.float32)
    weights = {"linear.weight": weight, "linear.bias": np.zeros(8, np.float32)}
    save_file(weights, directory / "2_Dense" / "model.safetensors", metadata={"format": "pt"})
    return directory
