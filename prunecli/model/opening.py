"""What config.json says of how a result opens: with plain transformers, or with prunecli through `auto_map`.

A result that no stock class can run keeps the model type of its family, so that its tokenizer, generation config and
processor open like any other's. Its model does not open as a stock one: `transformers_weights`, the key that names
the file to load, holds the reason in place of a file, so that every stock class refuses and says it; `architectures`
names no class of transformers, which is what other programs look at.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from prunecli import PACKAGE
from prunecli.architectures import Architecture
from prunecli.architectures.records import ModelClass
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import CLASS_PREFIX, class_names, with_keys
from prunecli.model.layout import ModelLayout
from prunecli.model.stock import stock_support
from prunecli.model.structure import KEY, WEIGHTS_KEY, Structure

SHIM = "modeling_prunecli"
"""The module, in the directory of a result, that opens it through `auto_map`."""

SHIM_FILE = f"{SHIM}.py"
"""Written into every result that no stock class can run; named in its `auto_map`."""

_SOURCE = '''"""Opens this checkpoint with prunecli, which knows how it differs from its stock architecture."""

import os

from transformers import PreTrainedModel

SPREAD = ("balanced", "balanced_low_0", "sequential")
FAULTS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")


class PrunecliModel(PreTrainedModel):
    """Stands in for the model class; `from_pretrained` returns the model that prunecli loads."""

    model_class = None

    @classmethod
    def from_pretrained(cls, path, *arguments, dtype=None, torch_dtype=None, device_map=None, **options):
        """Load on one device, by default the CPU; `dtype` is by default what `prunecli.load_model` chooses."""
        try:
            import prunecli
        except ImportError:
            raise ImportError(
                f"{path} is not a stock model: opening it needs PACKAGE. Install it from its repository."
            ) from None
        if isinstance(device_map, dict):
            if len(set(map(str, device_map.values()))) != 1:
                raise ValueError(f"device_map={device_map}: prunecli loads a model on one device.")
            device_map = next(iter(device_map.values()))
        if isinstance(device_map, int):
            device_map = f"cuda:{device_map}"
        if options.get("quantization_config"):
            raise ValueError("quantization_config: prunecli does not know this option.")
        if not os.path.isdir(path):
            from huggingface_hub import snapshot_download

            hub = {name: options[name] for name in HUB_OPTIONS if options.get(name) is not None}
            path = snapshot_download(str(path), **hub)
        kind = torch_dtype if dtype is None else dtype
        device = "auto" if str(device_map) in SPREAD else device_map or "cpu"
        model = prunecli.load_model(path, dtype=kind or "auto", device=device, model_class=cls.model_class)
        # It refuses a checkpoint with a tensor that is missing, unexpected or misshapen.
        return (model, {key: [] for key in FAULTS}) if options.get("output_loading_info") else model
'''
_CLASS = '''

class PREFIXNAME(PrunecliModel):
    """Stands in for NAME."""

    model_class = "NAME"
'''


def result_config(
    source: Checkpoint,
    structure: Structure,
    *,
    tensors: Collection[str] | None = None,
    classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """config.json of a result: the source's, patched as JSON.

    Args:
        source: what the result is made of.
        structure: of the result.
        tensors: names of those of the result, as far as they say which classes can read it; None: as the source.
        classes: that it says it is of; None: those of the source.

    Raises:
        UnsupportedModelError: its class says nothing.
        CheckpointError: config.json lacks a size, or says what cannot be.
    """
    support, result = stock_support(source, structure), source.resolved.changed(structure)
    family = result.family
    config = {key: value for key, value in result.config.items() if key not in (KEY, "auto_map", WEIGHTS_KEY)}
    config["model_type"] = family.model_type
    # Of the source's own code the tokenizer's travels along, and the model's where that opens the result.
    keeps_code, foreign = not family.stacks and support.is_stock, source.config.get("auto_map")
    auto_map = {
        key: value
        for key, value in (foreign.items() if isinstance(foreign, Mapping) else ())
        if not (
            str(value).startswith(f"{SHIM}.") if keeps_code else key.startswith(("AutoModel", "AutoConfig"))
        )
    }
    classes = tuple(classes or class_names(source.config))
    config = with_keys(config, support.config)
    if not support.is_stock:
        names = source.tensors if tensors is None else tensors
        opened_by = auto_classes(family, readable(result, names), classes)
        opened_by = opened_by or {family.auto_class: family.model_class}  # which no auto class opens
        auto_map |= {auto: f"{SHIM}.{CLASS_PREFIX}{name}" for auto, name in opened_by.items()}
        config[WEIGHTS_KEY] = (
            f"{support.line} Open it where {PACKAGE} is installed, "
            "with prunecli.load_model or trust_remote_code=True."
        )
    if classes:  # vLLM opens experts that are constants by the stock name
        is_named = support.is_stock or bool(structure.constants)
        config["architectures"] = [name if is_named else f"{CLASS_PREFIX}{name}" for name in classes]
    return {**config, **({"auto_map": auto_map} if auto_map else {}), KEY: structure.to_json()}


def shim_classes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The stock classes that the `auto_map` of a result names; none where it opens without it."""
    auto_map = config.get("auto_map")
    values = auto_map.values() if isinstance(auto_map, Mapping) else ()
    classes = (str(value).removeprefix(f"{SHIM}.") for value in values if str(value).startswith(f"{SHIM}."))
    return tuple(dict.fromkeys(name.removeprefix(CLASS_PREFIX) for name in classes))


def shim_source(classes: Sequence[str]) -> str:
    """The file's text for a checkpoint that these stock classes describe, each under a name of its own."""
    stand_ins = (_CLASS.replace("PREFIX", CLASS_PREFIX).replace("NAME", name) for name in classes)
    return _SOURCE.replace("PACKAGE", PACKAGE) + "".join(stand_ins)


def auto_classes(family: Architecture, names: Collection[str], named: Sequence[str]) -> dict[str, str]:
    """`AutoModel…` -> name of the stock class that it opens, for every class whose tensors there are.

    Args:
        family: of the model.
        names: of its tensors, tied aliases among them.
        named: the classes that config.json names.
    """
    declared = _classes(family) or (ModelClass(family.model_class, family.auto_class),)
    able = [cls for cls in declared if not _lacks(cls, names)]
    able.sort(key=lambda cls: cls.name not in named)  # stable: those of config.json come first
    names_by_auto: dict[str, str] = {}
    read = set()
    for cls in able:
        if cls.labelled:
            if cls.needs[-1] in read:
                continue
            read.add(cls.needs[-1])
        names_by_auto.setdefault(cls.auto_class, cls.name)
    return {
        cls.auto_class: names_by_auto[cls.auto_class] for cls in declared if cls.auto_class in names_by_auto
    }


def lacking(source: Checkpoint) -> dict[str, str]:
    """Return the classes that config.json names and the tensors do not allow -> prefix of a missing tensor.

    Raises:
        UnsupportedModelError: its class says nothing.
    """
    names = readable(source.resolved, source.tensors)
    named = class_names(source.config)
    lacks = {cls.name: _lacks(cls, names) for cls in _classes(source.resolved.family) if cls.name in named}
    return {name: needs[0] for name, needs in lacks.items() if needs}


def _classes(family: Architecture) -> tuple[ModelClass, ...]:
    return family.classes if family.found is None else family.found.classes


def _lacks(cls: ModelClass, names: Collection[str]) -> list[str]:
    """Needs of a class that no tensor meets; names may begin with the base model's, which needs leave out."""
    forms = {part for name in names for part in (name, name.partition(".")[2])}
    return [need for need in cls.needs if not any(name.startswith(need) for name in forms)]


def readable(layout: ModelLayout, names: Collection[str]) -> frozenset[str]:
    """`names`, and those of what is tied to them or made in their place by the structure of `layout`."""
    return frozenset((*names, *layout.ties, *(() if layout.tables is None else layout.tables.tensors)))
