"""Tiny mixture-of-experts language models of transformers' own classes, held in memory, with random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli.text.tokens import load_tokenizer
from tests.families import tiny
from tests.families.mixtures import MIXTURES, values_of
from tests.tiny import write_plain_tokenizer

TAPPED = ("llama4_text", "switch_transformers")
"""The families whose experts are observed in ways of their own."""
OBSERVED = tuple(name for name in MIXTURES if name not in TAPPED)
"""The families whose classes let their experts be run by a function of one's own."""


def tiny_mixture(model_type: str, *, seed: int = 0, **config: Any) -> Any:
    """A model in float32, in evaluation mode: weights that tell tokens apart, biases of routers too.

    Args:
        config: in place of what `values_of` says.
    """
    import transformers

    if model_type in MIXTURES:
        made = transformers.CONFIG_MAPPING[model_type](**{**values_of(model_type), **config})
    else:
        made = tiny.tiny_config(model_type)
    model = tiny.drawn(tiny.auto_class(model_type), made, seed)
    for name, tensor in model.named_buffers():
        if "bias" in name:  # of a router
            tensor.copy_(torch.rand(tensor.shape) * 0.1)
    return model


def save_mixture(folder: Path | str, model_type: str, **config: Any) -> Path:
    """A directory with a `tiny_mixture` and a plain tokenizer."""
    tiny_mixture(model_type, **config).save_pretrained(folder)
    write_plain_tokenizer(folder)
    return Path(folder)


def tiny_images_model() -> Any:
    """A Llama 4 of text and images, whose config keeps the language model's keys one level down."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration, __version__

    widths = ("hidden_size", "projector_input_dim", "projector_output_dim", "vision_output_dim")
    images = {**dict.fromkeys(widths, 16), "image_size": 28, "patch_size": 14, "intermediate_size": 32}
    images |= {"num_attention_heads": 2, "num_hidden_layers": 1}
    config = Llama4Config(text_config={**values_of("llama4_text"), "vocab_size": 80}, vision_config=images)
    model = tiny.drawn(Llama4ForConditionalGeneration, config)
    try:
        model(torch.ones(1, 1, dtype=torch.long))
    except AttributeError as error:
        pytest.skip(f"transformers {__version__} does not run this class: {error}")
    return model


def write_sentinels(directory: Path | str) -> None:
    """Write the files of a tokenizer that ends its texts, with marks of masked spans."""
    write_plain_tokenizer(directory, ("$A </s>", "$A $B </s>"))
    tokenizer = load_tokenizer(Path(directory))
    tokenizer.add_tokens([f"<extra_id_{number}>" for number in range(4)])
    tokenizer.save_pretrained(directory)
