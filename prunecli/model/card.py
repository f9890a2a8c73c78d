"""The README.md of a result: what was removed from what, and how to load it; its text is in card.md."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, Template

from prunecli import PACKAGE
from prunecli.model.declared import class_names
from prunecli.model.embedding import describe_embeddings
from prunecli.model.layout import ModelLayout
from prunecli.model.opening import SHIM, shim_classes
from prunecli.model.parts import describe_parts
from prunecli.model.structure import WEIGHTS_KEY, Structure, statistics_files

SHOWN_IDS = 8
"""Ids at either end of a longer list of experts; config.json has all."""

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


def model_card(
    layout: ModelLayout,
    source_card: str,
    parameters: int,
    nbytes: int,
    *,
    weights: bool = True,
) -> str:
    """The card's text; it names no path, so that equal runs give equal bytes wherever they write.

    Args:
        layout: of the result; the first step of its history names the original.
        source_card: text of the source's card; empty: it has none.
        parameters: number of parameters of the result.
        nbytes: bytes of its tensors.
        weights: whether they lie beside it.
    """
    structure, config = layout.structure, layout.config
    front = front_matter(source_card)
    is_new = bool(structure.history) and "from_scratch" in structure.history[-1]["arguments"]
    is_trained = is_new or {step["command"] for step in structure.history} == {"finetune"}
    what = "trained" if is_trained else "pruned"
    tags = front.get("tags")
    own = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    known, auto_map = layout.family.classes, config.get("auto_map", {})
    named = (cls.auto_class for cls in known if cls.name in class_names(config))
    names, sizes = ("parameters", "bytes of weights"), structure.original_size or ()
    text = _template().render(
        structure=structure,
        matter={
            **carried_matter(front, structure, config),
            "tags": list(dict.fromkeys([*own, "prunecli", what])),
        },
        origin=_name(structure.history[0].get("source", {})) if structure.history else None,
        what=what,
        is_new=is_new,
        sizes=list(zip(names, sizes, (parameters, nbytes), strict=False)),
        weights=weights,
        directory="path/to/this/directory",
        classes=shim_classes(config),
        auto_class=next(named, layout.family.auto_class),
        reason=config.get(WEIGHTS_KEY),
        ways=", ".join(f"`{auto}`" for auto in auto_map if str(auto_map[auto]).startswith(f"{SHIM}.")),
        package=PACKAGE,
        attentions=describe_parts(layout.attentions, {}),
        ffns=describe_parts(layout.ffns, structure.widths),
        embeddings=describe_embeddings(layout.tables),
        original=original_text(source_card, of_a_result=len(structure.history) > 1),
    )
    return f"{text.rstrip()}\n"


@cache
def _template() -> Template:
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "json": _json,
        "name": _name,
        "options": lambda given: ", ".join(f"{name} = {_json(value)}" for name, value in given.items()),
        "shortened": _shortened,
        "statistics": statistics_files,
    }
    return environment.from_string(files("prunecli.model").joinpath("card.md").read_text("utf-8"))


def _json(value: Any) -> str:
    """JSON, which is YAML; what YAML alone knows (dates) is written as text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _shortened(ids: Sequence[int]) -> str:
    if len(ids) <= 3 * SHOWN_IDS:
        return " ".join(map(str, ids))
    return f"{_shortened(ids[:SHOWN_IDS])} … {_shortened(ids[-SHOWN_IDS:])}"


def _name(source: Mapping[str, Any]) -> str | None:
    """`org/name`, `org/name/0_Transformer`; None where it was made from scratch."""
    return "/".join(source[key] for key in ("path", "subfolder") if key in source) or None


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
    is_made_of_it = any(sources[:1])  # not trained from scratch
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
