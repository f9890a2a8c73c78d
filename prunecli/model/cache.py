"""What a mixture-of-experts model keeps while it decodes, layer by layer: by its headers, and config.json.

How wide it is, tensors tell; which layers forget, `layer_types` does:

| a layer has | kept of a token, values | kept of a sequence, values |
| --- | --- | --- |
| `k_proj` and `v_proj`, or `qkv_proj` | rows of keys and values | |
| `kv_a_proj_with_mqa` (latent attention) | its rows: latents and the rotary part, as transformers has it from 5 on | |
| `indexer.wk` beside one of these | its rows | |
| `A_log` (Mamba, gated delta rules) | | channels of its output x size of a head's state, in float32 |
| `conv1d` or `conv.conv` | | all values of the kernel |
| none of these, and `layer_types` says linear (lightning attention) | | channels of its output x size of a head |

A layer with a window, or with chunks, keeps the tokens of one, less the one at work.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import text_config
from prunecli.tensors.reader import TensorInfo

KEYS_AND_VALUES = re.compile(r"(?:^|\.)(?:k_proj|v_proj|(?:SelfAttention|EncDecAttention)\.[kv])\.weight$")
LATENT, INDEXER, FUSED = "kv_a_proj_with_mqa.weight", "indexer.wk.weight", "qkv_proj.weight"
OUTPUTS = (".out_proj.weight", ".o_proj.weight", ".o.weight")
CONVOLUTION = re.compile(r"conv(?:1d|\.conv)\.weight$")
REMEMBERS = re.compile(r"attn|attention|mamba|conv|ssm|mixer\.A", re.IGNORECASE)
HEAD_STATES = ("mamba_d_state", "ssm_state_size", "linear_key_head_dim", "linear_head_dim")
WINDOWS = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Of `layer_types` -> the key of how many tokens it sees."""


@dataclass(frozen=True)
class LayerCache:
    """Number of cached values of a layer.

    Attributes:
        token: of each token.
        most: tokens that it keeps; None: all.
        state: of each sequence, in the type that the model computes in.
        wide_state: of each sequence, in float32.
    """

    token: int = 0
    most: int | None = None
    state: int = 0
    wide_state: int = 0

    def bytes(self, sequences: int, length: int, itemsize: int) -> int:
        """Return the bytes for `sequences` of `length` tokens, with `itemsize` bytes for each value."""
        tokens = length if self.most is None else min(length, self.most)
        return sequences * ((self.token * tokens + self.state) * itemsize + 4 * self.wide_state)


@dataclass(frozen=True)
class ModelCache:
    """Cache sizes of all layers.

    Attributes:
        layers: in their order.
        unknown: plain lines on what cannot be known, and is counted as nothing or as the most.
    """

    layers: tuple[LayerCache, ...]
    unknown: tuple[str, ...]

    def bytes(self, sequences: int, length: int, itemsize: int) -> int:
        """Return the bytes of all layers; see `LayerCache.bytes`."""
        return sum(layer.bytes(sequences, length, itemsize) for layer in self.layers)


def stated_count(config: Mapping[str, Any], *keys: str) -> int:
    """The first count above 0 that config.json states under one of `keys`; 0: there is none."""
    values = (config.get(key) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), 0)


def text_layers(checkpoint: Checkpoint) -> dict[int, dict[str, TensorInfo]]:
    """Number of a layer that decodes -> its tensors, unquantised, by their names in it.

    Raises:
        UnsupportedModelError: the model has no experts.
        CheckpointError: as `find_mixtures`.
    """
    mixtures = [layer for layer in checkpoint.require_mixtures() if layer.side == "decoder"]
    first = next((layer for layer in mixtures if not layer.is_predicting), None)
    if first is None:
        return {}
    stack = first.name.partition(f".{first.layer}.")[0]
    own = re.compile(re.escape(stack) + r"\.(\d+)\.(.*)")
    predicting = {layer.layer for layer in mixtures if layer.is_predicting and own.match(f"{layer.name}.")}
    found: dict[int, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.unquantised.items():
        if (match := own.fullmatch(name)) and int(match[1]) not in predicting:
            found.setdefault(int(match[1]), {})[match[2]] = info
    return dict(sorted(found.items()))


def find_cache(checkpoint: Checkpoint) -> ModelCache:
    """Return the cache sizes of the layers of a mixture-of-experts model.

    Raises:
        UnsupportedModelError, CheckpointError: as `text_layers`.
    """
    config = text_config(checkpoint.config)
    kinds = config.get("layer_types")
    layers, unknown = [], []
    for number, tensors in text_layers(checkpoint).items():
        kind = str(kinds[number]) if isinstance(kinds, list) and number < len(kinds) else ""
        layer = _layer(tensors, kind, config)
        if layer is None:
            unknown.append(number)
        else:
            layers.append(layer)
    lines = []
    if unknown:
        lines.append(
            f"What {len(unknown)} layers keep (the first is {unknown[0]}) is not known, and not counted."
        )
    window = stated_count(config, "sliding_window", "attention_chunk_size")
    if window and not isinstance(kinds, list) and config.get("use_sliding_window") is not False:
        lines.append(
            f"config.json has a window of {window:,} tokens, and does not say of which layers: all are counted whole."
        )
    return ModelCache(tuple(layers), tuple(lines))


def _layer(tensors: Mapping[str, TensorInfo], kind: str, config: Mapping[str, Any]) -> LayerCache | None:
    """Return the cache size of a layer, or None if the size is unknown."""

    def rows(ending: str) -> int:
        return sum(info.shape[0] for name, info in tensors.items() if name.endswith(ending))

    mixing = {name: info for name, info in tensors.items() if ".experts." not in name and "mlp." not in name}
    outputs = max((info.shape[-1] for name, info in mixing.items() if name.endswith(OUTPUTS)), default=0)
    kernels = sum(prod(info.shape) for name, info in tensors.items() if CONVOLUTION.search(name))
    decay = next((info for name, info in tensors.items() if name.endswith("A_log")), None)
    if decay is not None:
        if len(decay.shape) == 2:  # of each channel and value of its state
            return LayerCache(state=kernels, wide_state=prod(decay.shape))
        inner = config.get("linear_attn_config")
        inside = stated_count(inner, "head_dim") if isinstance(inner, Mapping) else 0
        size = stated_count(config, *HEAD_STATES) or inside  # of a state, for one channel of the output
        return None if not size or not outputs else LayerCache(state=kernels, wide_state=outputs * size)
    if kind == "linear_attention" and not kernels:
        width = stated_count(config, "head_dim")
        return LayerCache(state=outputs * width) if width and outputs else None
    fused = rows(FUSED)
    token = sum(info.shape[0] for name, info in mixing.items() if KEYS_AND_VALUES.search(name))
    token += rows(LATENT) + rows(INDEXER) + max(fused - outputs, 0)
    if not token and not kernels:
        return None if any(map(REMEMBERS.search, mixing)) else LayerCache()
    window = stated_count(config, WINDOWS.get(kind, ""))
    return LayerCache(token, window - 1 if window else None, state=kernels)
