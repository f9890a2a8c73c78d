"""The README.md of a result: what was removed from what, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prunecli.checkpoint.structure import Structure

CARRIED = ("license", "license_name", "license_link", "language", "base_model", "pipeline_tag")
"""Keys of the source card's front matter that hold for the result too."""


def model_card(name: str, structure: Structure, config: Mapping[str, Any], front: Mapping[str, Any]) -> str:
    """The card's text.

    Args:
        name: of the result's directory.
        structure: of the result.
        config: of the result.
        front: front matter of the source's card.
    """
    matter = {key: front[key] for key in CARRIED if key in front}
    matter |= {"library_name": "prunecli", "tags": ["prunecli", "pruned"]}
    lines = [
        "---",
        *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in matter.items()),
        "---",
    ]
    lines += ["", f"# {name}", "", "Made smaller by prunecli.", "", "## Load", "", "```python"]
    lines += ["import prunecli", "", f'model = prunecli.load_model("{name}")', "```", ""]
    auto_class = next((key for key in config.get("auto_map", {}) if key != "AutoConfig"), None)
    if auto_class:
        lines += [
            f'or `{auto_class}.from_pretrained("{name}", trust_remote_code=True)` from transformers',
            "",
        ]
        lines += [
            "(prunecli must be installed; so must the tokenizer be opened: with `trust_remote_code=True`).",
            "",
        ]
    lines += _experts(structure) + _history(structure)
    return "\n".join(lines)


def _experts(structure: Structure) -> list[str]:
    if not structure.experts:
        return []
    lines = ["## Experts", "", "| layer | kept | of | ids |", "| --- | ---: | ---: | --- |"]
    for layer, ids in structure.experts.items():
        original = structure.original_experts.get(layer, "?")
        lines.append(f"| `{layer}` | {len(ids)} | {original} | {' '.join(map(str, ids))} |")
    return [*lines, ""]


def _history(structure: Structure) -> list[str]:
    lines = ["## How it was made", ""]
    for step in structure.history:
        arguments = ", ".join(f"{key} {value}" for key, value in step.get("arguments", {}).items())
        source = step.get("source", {})
        lines.append(f"- `{step.get('command')}` ({arguments})")
        lines.append(f"  - from {source.get('path')}, {source.get('fingerprint')}")
        statistics = step.get("statistics") or []
        for file in [statistics] if isinstance(statistics, Mapping) else statistics:
            lines.append(f"  - statistics {file.get('file')}, sha256 {file.get('sha256')}")
    return [*lines, ""]


def front_matter(card: str) -> dict[str, Any]:
    """The YAML between the leading `---` lines of a card; empty where there is none or it cannot be read."""
    head, found, _ = card.removeprefix("---\n").partition("\n---")
    if not card.startswith("---\n") or not found:
        return {}
    import yaml

    try:
        value = yaml.safe_load(head)
    except yaml.YAMLError:
        return {}
    return dict(value) if isinstance(value, dict) else {}
