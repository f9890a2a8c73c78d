"""The README.md of a result: what was removed from what, and how to load it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prunecli import PACKAGE
from prunecli.model.axes import Kind
from prunecli.model.changes import EmbeddingChange
from prunecli.model.declared import class_names
from prunecli.model.embedding import describe_embeddings
from prunecli.model.layout import ModelLayout
from prunecli.model.opening import SHIM, shim_classes
from prunecli.model.parts import describe_parts
from prunecli.model.structure import WEIGHTS_KEY, Structure, statistics_files

DIRECTORY = "path/to/this/directory"

NO_WEIGHTS = (
    f"No weights are here: `prunecli finetune --from-scratch {DIRECTORY}` trains it from random ones."
)

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
    origin = _name(structure.history[0].get("source", {})) if structure.history else None
    front = front_matter(source_card)
    matter = carried_matter(front, structure, config)
    original = original_text(source_card, of_a_result=len(structure.history) > 1)
    is_new = bool(structure.history) and "from_scratch" in structure.history[-1].get("arguments", {})
    is_trained = is_new or {step.get("command") for step in structure.history} == {"finetune"}
    what = "trained" if is_trained else "pruned"
    paragraphs = [
        _front_matter(front, matter, what),
        f"# {origin}, {what}" if origin else f"# {what.capitalize()} checkpoint",
        f"Trained with prunecli{' from random weights' if is_new else ''}."
        if is_trained
        else "Made smaller with prunecli, which removes from a pretrained model what it does not need.",
        *([] if is_trained else _sizes(structure, parameters, nbytes)),
        *(_loading(layout) if weights else [NO_WEIGHTS]),
        *_sentences(matter, config),
        *_kept(structure, "layer", "stack"),
        *_kept(structure, "expert", "layer"),
        *_constants(structure),
        *_kept(structure, "head", "attention"),
        *_attentions(layout),
        *_ffns(layout),
        *_embeddings(layout),
        *_history(structure),
        *([ORIGINAL_CARD, original] if original else []),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _front_matter(front: Mapping[str, Any], matter: Mapping[str, Any], what: str) -> str:
    tags = front.get("tags")
    own = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    matter = {**matter, "tags": list(dict.fromkeys([*own, "prunecli", what]))}
    # JSON is YAML; what YAML alone knows (dates) is written as text.
    lines = (f"{key}: {json.dumps(value, ensure_ascii=False, default=str)}" for key, value in matter.items())
    return "\n".join(["---", *lines, "---"])


def _sizes(structure: Structure, parameters: int, nbytes: int) -> list[str]:
    """The table of sizes against the original model; empty if the history does not state the original's size."""
    if structure.original_size is None:
        return []
    sizes = zip(
        ("parameters", "bytes of weights"), structure.original_size, (parameters, nbytes), strict=True
    )
    lines = [f"| {name} | {before:,} | {after:,} | {after / before:.1%} |" for name, before, after in sizes]
    return ["\n".join(["| | original | this model | left |", "| --- | ---: | ---: | ---: |", *lines])]


def _loading(layout: ModelLayout) -> list[str]:
    """How the model opens: with plain transformers, or with prunecli alone."""
    config, stock_class = layout.config, _auto_class(layout)
    classes = shim_classes(config)
    auto_map = config.get("auto_map", {})
    opens = (
        f'prunecli.load_model("{DIRECTORY}")' if classes else f'{stock_class}.from_pretrained("{DIRECTORY}")'
    )
    lines = [
        *(["import prunecli"] if classes else []),
        f"from transformers import {'AutoTokenizer' if classes else f'{stock_class}, AutoTokenizer'}",
        "",
        f"model = {opens}",
        f'tokenizer = AutoTokenizer.from_pretrained("{DIRECTORY}")',
    ]
    paragraphs = ["## How to load it", "\n".join(["```python", *lines, "```"])]
    if not classes:
        plain = (
            "It is a model of its stock architecture: plain transformers, and what builds on it, opens it."
        )
        return [*paragraphs, plain]
    ways = ", ".join(f"`{name}`" for name in auto_map if str(auto_map[name]).startswith(f"{SHIM}."))
    return [
        *paragraphs,
        f"{config.get(WEIGHTS_KEY)} `from_pretrained(…, trust_remote_code=True)` of transformers' {ways} gives the "
        f"same model, each in its own class. Both need {PACKAGE}.",
    ]


def _auto_class(layout: ModelLayout) -> str:
    """The `AutoModel…` of the class that config.json names; else that of the family."""
    named = class_names(layout.config)
    known = (known.auto_class for known in layout.family.classes if known.name in named)
    return next(known, layout.family.auto_class)


def _sentences(matter: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """How to load a model with sentence-transformers, which adds its pooling."""
    if matter["library_name"] != "sentence-transformers":
        return []
    trust = ", trust_remote_code=True" if shim_classes(config) else ""
    where = f", where {PACKAGE} is installed" if trust else ""
    call = f'sentence_transformers.SentenceTransformer("{DIRECTORY}"{trust})'
    return [f"`{call}` opens it with its pooling{where}."]


def _kept(structure: Structure, kind: Kind, owner: str) -> list[str]:
    what, axes = f"{kind}s", structure.of_kind(kind)
    if not axes:
        return []
    lines = [
        f"| {owner} | kept | of | removed | ids of the kept {what} |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for name, units in axes.items():
        left, gone = len(units.kept), f"{1 - len(units.kept) / units.of:.1%}" if units.of else "-"
        lines.append(f"| `{name}` | {left} | {units.of} | {gone} | {_ids(units.kept) or 'none'} |")
    remaining = sum(len(units.kept) for units in axes.values())
    whole = sum(units.of for units in axes.values())
    return [
        f"## {what.capitalize()}",
        f"{remaining} of {whole} {what} are left in these {owner}s. Ids are those of the original model; config.json "
        'holds all of them, under `"prunecli"`.',
        "\n".join(lines),
    ]


def _constants(structure: Structure) -> list[str]:
    if not structure.constants:
        return []
    lines = ["| layer | constants | ids of the experts |", "| --- | ---: | --- |"]
    lines += [f"| `{name}` | {len(ids)} | {_ids(ids)} |" for name, ids in structure.constants.items()]
    return [
        "## Constants",
        "The mean output of each of these experts stands for it. The router goes on choosing it. Ids are those of the "
        "original model.",
        "\n".join(lines),
    ]


def _attentions(layout: ModelLayout) -> list[str]:
    described = describe_parts(layout.attentions, {})
    if not described:
        return []
    return [
        "## Attention",
        f"Attention: {described}.",
        "Layers count from 0. A shared attention is stored once, under the name of the layer that it is said to be of; "
        "each layer keeps its own norms and its own part of a cache. A removed one is gone together with its norms. "
        'config.json names them, under `"prunecli"`.',
    ]


def _ffns(layout: ModelLayout) -> list[str]:
    described = describe_parts(layout.ffns, layout.structure.widths)
    if not described:
        return []
    return [
        "## Feed-forward networks",
        f"FFN: {described}.",
        "Layers count from 0. A shared FFN is stored once, under the name of the layer that it is said to be of; each "
        "layer keeps its own norm. A removed one is gone together with its norm. config.json names them, under "
        '`"prunecli"`.',
    ]


def _embeddings(layout: ModelLayout) -> list[str]:
    if layout.structure.embedding == EmbeddingChange():
        return []
    described = describe_embeddings(layout.tables)
    return [
        "## Token embeddings",
        f"{described[0].upper()}{described[1:]}.",
        "A unit makes the rows of an embedding table from those of a narrower one (DeFINE, arXiv 1911.12385). They "
        "depend on the token alone, so `prunecli factorize-embeddings --cache` can write them down as a table again.",
    ]


def _ids(ids: Sequence[int]) -> str:
    if len(ids) <= 3 * SHOWN_IDS:
        return " ".join(map(str, ids))
    return f"{' '.join(map(str, ids[:SHOWN_IDS]))} … {' '.join(map(str, ids[-SHOWN_IDS:]))}"


def _name(source: Mapping[str, Any]) -> str | None:
    """`org/name`, `org/name/0_Transformer`; None where it was made from scratch."""
    return "/".join(source[key] for key in ("path", "subfolder") if key in source) or None


def _history(structure: Structure) -> list[str]:
    if not structure.history:
        return []
    steps = []
    for number, step in enumerate(structure.history, 1):
        source = step.get("source", {})
        steps.append(f"{number}. `{step.get('command')}` of prunecli {step.get('prunecli')}")
        if source:
            revision = f" at {source['revision']}" if "revision" in source else ""
            steps.append(f"   - from `{_name(source)}`{revision}, {source.get('fingerprint')}")
        options = ", ".join(
            f"{name} = {json.dumps(value, ensure_ascii=False, default=str)}"
            for name, value in step.get("arguments", {}).items()
        )
        if options:
            steps.append(f"   - options: {options}")
        for file in statistics_files(step):
            steps.append(f"   - statistics: `{file.get('file')}`, sha256 {file.get('sha256')}")
    return [HISTORY, "\n".join(steps)]


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
