"""Settings of a quantisation that name experts by number: they follow the experts (`quantization_config`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prunecli.errors import UnsupportedModelError
from prunecli.model.mixtures import SparseLayer

_NUMBERED = re.compile(r"experts?\\?[._](?:expert_)?\d+")
_GONE = object()


def renumbered(settings: Any, layers: Sequence[SparseLayer], places: Mapping[str, Sequence[int]]) -> Any:
    """The settings with every expert's name as it is after pruning; those of dropped experts are left out.

    Args:
        settings: JSON: names of modules are keys or texts in it, as in `ignore` of compressed-tensors.
        layers: that lose experts, or change their order.
        places: layer's name -> places of the experts that stay, in their new order.

    Raises:
        UnsupportedModelError: a name with an expert's number that fits no layer: a pattern, of many layers perhaps.
    """
    new_numbers = {
        layer.name: (
            _pattern(layer.expert_prefix),
            {old: new for new, old in enumerate(places[layer.name])},
        )
        for layer in layers
        if layer.expert_prefix
    }

    def rename(text: str) -> Any:
        if not _NUMBERED.search(text):
            return text
        for pattern, numbers in new_numbers.values():
            if match := pattern.search(text):
                new = numbers.get(int(match[1]))
                return _GONE if new is None else f"{text[: match.start(1)]}{new}{text[match.end(1) :]}"
        if any(f"{name.removeprefix('model.')}." in text for name in places) or text.startswith("re:"):
            raise UnsupportedModelError(
                f'config.json: the quantisation settings name experts by number: "{text}"',
                "prunecli cannot say which of them stay; write the names of single modules there.",
            )
        return text

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return rename(value)
        if isinstance(value, list):
            return [kept for item in value if (kept := walk(item)) is not _GONE]
        if isinstance(value, dict):
            renamed = ((rename(key), walk(item)) for key, item in value.items())
            return {key: item for key, item in renamed if key is not _GONE and item is not _GONE}
        return value

    return walk(settings) if new_numbers else settings


def _pattern(prefix: str) -> re.Pattern[str]:
    """An expert's name; the settings may leave out the `model.` before it."""
    escaped = re.escape(prefix.removeprefix("model.")).replace(r"\{expert\}", r"(\d+)")
    return re.compile(rf"(?:^|(?<=model\.)){escaped}(?=$|\.)")
