"""What the card of a result keeps of its source's: metadata, the model that it is based on, the original text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prunecli.model.structure import Structure

ORIGINAL_CARD = "# Original model card"
"""Heading below which a result's card holds the original model's text."""

HISTORY = "## How it was made"
"""Heading that every card of a result has."""

CARRIED = ("license", "license_name", "license_link", "language", "datasets", "pipeline_tag")
"""Keys of the source card's front matter that hold for the result too."""

LIBRARIES = ("sentence-transformers",)
"""Values of `library_name` that hold for the result too; any other one becomes transformers."""

_HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_LOCAL = re.compile(
    r"(out(put)?s?|results?|models?|ckpts?|checkpoints?|data|tmp|home|runs?|exp(eriment)?s?|train(ing|ed)?|saved?)/.*"
    r"|.*/(checkpoint-\d+|best|last|final|model|checkpoint)",
    re.IGNORECASE,
)


def front_matter(card: str) -> dict[str, Any]:
    """The YAML between the leading `---` lines of a card; empty where there is none or it cannot be read."""
    import yaml

    try:
        value = yaml.safe_load("\n".join(_split(card)[0]))
    except (yaml.YAMLError, ValueError):
        return {}
    return dict(value) if isinstance(value, dict) else {}


def original_text(card: str, *, of_a_result: bool) -> str:
    """The text of the original model's card, without front matter; empty where there is none.

    Args:
        card: of the source.
        of_a_result: whether the source is a result itself; its card, if prunecli wrote it, holds the original's below
            `ORIGINAL_CARD`, so that the text is kept once however often a model is reduced.
    """
    lines = _split(card)[1]
    if of_a_result and HISTORY in lines:
        lines = lines[lines.index(ORIGINAL_CARD) + 1 :] if ORIGINAL_CARD in lines else []
    return "\n".join(lines).strip()


def carried_matter(
    front: Mapping[str, Any], structure: Structure, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The front matter of a result that says the same of its source.

    The hub infers the relation to the base model (finetune, adapter, merge or quantized are its words); no word of its
    is for a pruned one, so that only the source's own is carried.
    """
    library = front.get("library_name")
    matter = {key: front[key] for key in CARRIED if key in front}
    base, is_own = _base_model(front, structure, config)
    if base:
        matter["base_model"] = base
    if is_own and "base_model_relation" in front:
        matter["base_model_relation"] = front["base_model_relation"]
    matter["library_name"] = library if library in LIBRARIES else "transformers"
    return matter


def _base_model(
    front: Mapping[str, Any], structure: Structure, config: Mapping[str, Any]
) -> tuple[Any, bool]:
    """The hub's id of what the result was made of, or of what that was; whether the source's card says it."""
    sources = [step.get("source", {}) for step in structure.history]
    on_the_hub = [source.get("path") for source in sources if "revision" in source]
    if sources and "revision" in sources[-1]:
        return on_the_hub[-1], False
    if front.get("base_model"):
        return front["base_model"], True
    if on_the_hub:
        return on_the_hub[-1], False
    name = str(config.get("_name_or_path"))
    is_made_of_it = bool(sources) and bool(sources[0])  # not trained from scratch
    # As ORG/NAME, and not as the path of a directory that some training wrote.
    is_hub_id = _HUB_ID.fullmatch(name) and not _LOCAL.fullmatch(name)
    return (name if is_made_of_it and is_hub_id else None), False


def _split(card: str) -> tuple[list[str], list[str]]:
    """The lines of the front matter and those of the text."""
    lines = card.removeprefix("\ufeff").splitlines()
    if lines and lines[0].strip() == "---":
        for number, line in enumerate(lines[1:], 1):
            if line.strip() == "---":
                return lines[1:number], lines[number + 1 :]
    return [], lines
