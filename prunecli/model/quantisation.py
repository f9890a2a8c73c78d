"""What config.json says of quantised weights; which of the tensors are such is seen in `prunecli.model.quantised`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prunecli.tensors.dtypes import COMPUTED, parse_dtype

KEYS = ("quantization_config", "compression_config", "quantization")
"""Of config.json: transformers', compressed-tensors' of old, MLX's."""


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantisation settings of config.json or of its part on a language model; empty if there are none."""
    inner = config.get("text_config")
    places = (config, inner if isinstance(inner, Mapping) else {})
    stated = (place.get(key) for place in places for key in KEYS)
    return next((value for value in stated if isinstance(value, Mapping)), {})


def method_of(config: Mapping[str, Any]) -> str:
    """The method that config.json names ("awq"); "" where it names none."""
    settings = settings_of(config)
    return str(settings.get("quant_method") or "of unknown method") if settings else ""


def value_dtype(config: Mapping[str, Any]) -> str:
    """The safetensors type that quantised weights stand for: that of config.json, else bfloat16."""
    stated = config.get("dtype") or config.get("torch_dtype")
    known = stated.removeprefix("torch.") if isinstance(stated, str) else ""
    return parse_dtype(known) if known in COMPUTED else "BF16"


def renamed_settings(config: Mapping[str, Any], rename: Callable[[str], str | None]) -> dict[str, Any]:
    """`config` with other names of modules in what it says of the quantisation, keys and texts in lists alike.

    Args:
        rename: the new name of a text that stands there; None: it is left out.
    """

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return rename(value)
        if isinstance(value, list):
            return [new for item in value if (new := walk(item)) is not None or item is None]
        if isinstance(value, dict):
            pairs = ((rename(key), walk(item), item) for key, item in value.items())
            return {
                key: new for key, new, item in pairs if key is not None and (new is not None or item is None)
            }
        return value

    return {key: walk(value) if key in KEYS else value for key, value in config.items()}


def weight_settings(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of compressed-tensors for weights, group by group of modules."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights
