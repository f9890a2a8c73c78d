"""Settings of a quantisation that name experts by number: they follow the experts (`quantization_config`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prunecli.model.quantisation import numbered_refusal, renamed_settings
from prunecli.model.sparse_layer import SparseLayer

_NUMBERED = re.compile(r"experts?\\?[._](?:expert_)?\d+")


def renumbered(
    path: Path, config: Mapping[str, Any], layers: Sequence[SparseLayer], places: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """config.json with every expert's name as it is after pruning; those of dropped experts are left out.

    Args:
        path: of the checkpoint, for messages.
        config: names of modules are keys or texts in its settings, as in `ignore` of compressed-tensors.
        layers: that lose experts, or change their order.
        places: layer's name -> places of the experts that stay, in their new order.

    Raises:
        UnsupportedModelError: a name with an expert's number that fits no layer: a pattern, of many layers perhaps.
    """
    new_numbers = []
    for layer in layers:
        if layer.expert_prefix:
            # An expert's name; the settings may leave out the `model.` before it.
            escaped = re.escape(layer.expert_prefix.removeprefix("model.")).replace(r"\{expert\}", r"(\d+)")
            pattern = re.compile(rf"(?:^|(?<=model\.)){escaped}(?=$|\.)")
            new_numbers.append((pattern, {old: new for new, old in enumerate(places[layer.name])}))

    def rename(text: str) -> str | None:
        if not _NUMBERED.search(text):
            return text
        for pattern, numbers in new_numbers:
            if match := pattern.search(text):
                new = numbers.get(int(match[1]))
                return None if new is None else f"{text[: match.start(1)]}{new}{text[match.end(1) :]}"
        if any(f"{name.removeprefix('model.')}." in text for name in places) or text.startswith("re:"):
            raise numbered_refusal(path, "experts", text)
        return text

    return renamed_settings(config, rename) if new_numbers else dict(config)
