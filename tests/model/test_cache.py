"""What layers keep while they decode, against the tensors that transformers' own classes have kept."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from prunecli.model.cache import find_cache, stated_count
from prunecli.model.checkpoint import open_model
from tests.stock_mixtures import tiny_mixture
from tests.tiny import change_config

BATCH = 2
UNEXPLAINED = ("_sliding_window_tensor",)


def kept(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors that a cache holds, however deep."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    own = {name: part for name, part in getattr(value, "__dict__", {}).items() if name not in UNEXPLAINED}
    for part in (*held, *own.values()):
        yield from kept(part, seen)


def cached_bytes(model: Any, length: int) -> int:
    tokens = torch.randint(3, 60, (BATCH, length), generator=torch.Generator().manual_seed(0))
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {"use_cache": True}
    with torch.no_grad():
        cache = model(tokens, **more).past_key_values
    return sum(tensor.nbytes for tensor in kept(cache, set()) if tensor.dim() > 1)


KINDS = ("qwen3_moe", "deepseek_v2", "deepseek_v3", "nemotron_h", "minimax", "granitemoehybrid")
"""Types that keep keys and values in different ways: whole, as latent vectors, as states."""
STATES = ("qwen3_next", "lfm2_moe", "jamba")
"""Those that keep some in float32, and more kinds of them than one."""
WINDOWED = ("exaone_moe", "gpt_oss", "mimo_v2_flash", "llama4_text")
"""Those of which some layers keep a window or a chunk."""


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [*((name, torch.float32) for name in KINDS + WINDOWED), *((name, torch.bfloat16) for name in STATES)],
)
def test_what_a_stock_class_keeps(model_type, dtype):
    model = tiny_mixture(model_type).to(dtype)
    model.save_pretrained("model")
    cache = find_cache(open_model("model"))
    for length in (5, 7, 8, 9, 30):
        assert cache.bytes(BATCH, length, dtype.itemsize) == cached_bytes(model, length)
    assert not cache.unknown
    assert any(layer.most is not None for layer in cache.layers) is (model_type in WINDOWED)


@pytest.mark.parametrize(
    ("model_type", "key"), [("mixtral", "sliding_window"), ("llama4_text", "attention_chunk_size")]
)
def test_a_window_of_no_named_layers_is_said_and_counted_whole(model_type, key):
    tiny_mixture(model_type).save_pretrained("model")
    change_config("model", "layer_types", **{key: 8})
    cache = find_cache(open_model("model"))
    assert len(cache.unknown) == 1
    assert all(layer.most is None for layer in cache.layers)


def test_a_state_of_unknown_size_is_said():
    tiny_mixture("qwen3_next").save_pretrained("model")
    change_config("model", "linear_key_head_dim")
    assert "(the first is 0)" in find_cache(open_model("model")).unknown[0]


@pytest.mark.parametrize("stated", [0, "8", None])
def test_what_is_no_count_is_as_good_as_absent(stated):
    assert stated_count({"a": stated}, "a") == 0
    assert stated_count({"a": stated, "b": 8}, "a", "b") == 8
