"""Small copies of a model for trials: a config with the same switches and lists, but small sizes."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from prunecli.model.declared import EXPERTS, value_of, with_keys
from prunecli.model.probe import (
    HEAD_WIDTHS,
    HIDDEN,
    OTHER_SENSES,
    WIDTH,
    head_counts,
    hidden_beside,
    is_key_value,
    last_part,
    numbers,
    outer,
    shared_keys,
)
from prunecli.model.skeleton import Skeleton

_COUNTS = re.compile(
    r"layer|heads$|n_head$|experts|groups?$|top_?k|kernel|steps?$|bucket|period|interval|pattern|freq|beam|length|"
    r"(^|_)num_|(^|_)n_(?!embd|inner)|version|multiple|type|blocks|ratio|stride|seed|distance"
)
"""Keys of whole numbers that do not shrink with the sizes of tensors."""
TOP_K = re.compile(r"experts_per_tok(en)?$|^(moe_)?top_?k(_experts)?$|^moe_k$")
"""Keys of numbers of experts that a token is given to."""
_DEPTH = re.compile(r"^(depth|num_blocks|(num_)?(hidden_|encoder_)?layers)$")
_FEW = {EXPERTS: 16, TOP_K: 4, re.compile(r"^(n|num_expert)_group$"): 2, re.compile(r"^topk_group$"): 1}
"""Keys -> how many experts a small model has, and groups of experts and choices of a router at most."""
_MOST = 40_000_000
"""Numbers that the small model has at most."""
TOKENS, _POSITIONS, _WINDOW, _HEAD, _STREAM = 96, 64, 4, 4, 8
_LEAST = 4
"""Smallest size: with two hidden units both may be zero behind a ReLU."""


def smaller_skeletons(skeleton: Skeleton) -> Iterator[Skeleton]:
    """Skeletons with smaller sizes, the smallest first, whose heads divide the hidden size as those of the model do."""
    # Where a list says how the width of a head is divided, heads have to stay as wide, or nearly: few are left then.
    every, scales = skeleton.effective, (128, 64, 32, 16, 8, 4, 2, 1)
    for values, kept, scale in product((every, _with_few_heads(every)), ((), HEAD_WIDTHS), scales):
        made = replace(skeleton, config=_scaled(values, scale, kept))
        with suppress(Exception):  # of any kind: what a class makes of sizes that it does not like
            is_alike = _divided(made.config) == _divided(every)
            heads, sizes = _head_widths(made.config), numbers(made.config)
            streams = [size for key, size in sizes if last_part(key) in HIDDEN]
            is_wide = all(width >= _HEAD for width in heads) and all(size >= _STREAM for size in streams)
            is_alike &= scale == 1 or is_wide
            if is_alike and sum(map(prod, made.stored.values())) < _MOST:
                yield made


def _with_few_heads(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config with two or four heads of keys and values, of the same width, and narrower FFNs."""
    counts = head_counts(values)
    changes: dict[str, int] = {}
    for key, queries in counts.items():
        if is_key_value(key) or queries < 1:
            continue
        shared = shared_keys(counts, key)
        held = max(min((counts[one] for one in shared), default=queries), 1)
        few = next(number for number in (4, 2, held) if held % number == 0)
        heads = few * (2 if queries // held % 2 == 0 else queries // held)
        changes |= {key: heads, **dict.fromkeys(shared, few)}
        sizes = {outer(key) + name: value_of(values, outer(key) + name) for name in HIDDEN}
        changes |= {name: size * heads // queries for name, size in sizes.items() if type(size) is int}
    widths = {key: max(value // 8, 16) for key, value in numbers(values) if WIDTH.search(last_part(key))}
    return with_keys(values, {**changes, **widths})


def _scaled(values: Mapping[str, Any], scale: int, kept: tuple[str, ...]) -> dict[str, Any]:
    """A config with sizes divided by `scale`, but for those under keys that end like these."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        is_layer = key == "per_layer_config" or key.isdecimal()
        if isinstance(value, Mapping) and ("model_type" in value or is_layer):
            found[key] = _scaled(value, _dividing(value, scale) if OTHER_SENSES.search(key) else scale, kept)
        elif isinstance(value, Mapping) and key.startswith("rope_"):
            found[key] = {name: _narrower(one, 1 if kept else scale) for name, one in value.items()}
        elif key.endswith(kept):
            found[key] = value
        elif key == "pad_token_id" and value is None:  # classifiers take several texts only if they know one
            found[key] = 0
        elif type(value) is int:
            found[key] = _small(key, value, scale)
        elif isinstance(value, list) and all(type(one) is int for one in value):
            found[key] = [_small(key, one, scale) for one in value]
        else:
            found[key] = value
    return found


def _dividing(values: Mapping[str, Any], scale: int) -> int:
    """The largest divisor, `scale` at most, after which heads divide the width of a part for images or sounds."""
    widths = [width for name in (*HIDDEN, "embed_dim") if type(width := values.get(name)) is int]
    counts = [count for count in head_counts(values).values() if count > 0]
    while scale > 1 and any(width // scale % count for width in widths for count in counts):
        scale //= 2
    return scale


def _narrower(value: Any, scale: int) -> Any:
    """A list about the frequencies of a head, for a head `scale` times narrower: factors, or lengths of sections."""
    if not isinstance(value, list) or not value:
        return value
    if any(isinstance(one, float) for one in value):
        return value[: max(len(value) // scale, 1)]
    return value if any(length % scale for length in value) else [length // scale for length in value]


def few_experts(key: str, value: int) -> int:
    """The value of a key in a model with few experts, of which as many can go as in any other."""
    for pattern, few in _FEW.items():
        if pattern.search(last_part(key)) and value > 1:
            return few if pattern is EXPERTS else min(value, few)
    return value


def shallow_towers(values: Mapping[str, Any], within: str = "", tower: bool = False) -> dict[str, int]:
    """Return the values of config.json for a model whose parts for images and sounds have two layers."""
    found: dict[str, int] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and "model_type" in value:
            found |= shallow_towers(value, f"{within}{key}.", tower or bool(OTHER_SENSES.search(key)))
        elif tower and _DEPTH.search(key) and type(value) is int and value > 2:
            found[within + key] = 2
    return found


def _small(key: str, value: int, scale: int) -> int:
    if re.search(r"_ids?$", key):
        return value if value < 8 else value % 7 + 1
    bounds = {
        r"vocab_size": TOKENS,
        r"position": _POSITIONS,
        r"window(?!_layers)|chunk_size$|block_size|local_attention": _WINDOW,
    }
    for pattern, most in bounds.items():
        if re.search(pattern, key):
            return min(value, most)
    if (few := few_experts(key, value)) != value:
        return few
    return value if value < 16 or _COUNTS.search(key) else max(value // scale, _LEAST)


def _divided(values: Mapping[str, Any]) -> list[bool]:
    """Whether the heads of each kind divide the hidden size, where their width follows from that."""
    return [width.is_integer() for width in _head_widths(values)]


def _head_widths(values: Mapping[str, Any]) -> list[float]:
    """Width of a head of each kind, where it follows from the number of heads and the hidden size."""
    stating = {outer(key) for key, _ in numbers(values) if key.endswith(HEAD_WIDTHS)}
    return [
        size / count
        for key, count in head_counts(values).items()
        if count > 0 and outer(key) not in stating and (size := hidden_beside(values, key))
    ]
