"""What a family's record means for one config.json: values, counts and tied names."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prunecli.architectures import REDUCED_PREFIX, Architecture
from prunecli.architectures.records import Stack, TensorSpec
from prunecli.errors import CheckpointError
from prunecli.model.structure import WEIGHTS_KEY, Structure

TIE_KEY = "tie_word_embeddings"
CLASS_PREFIX = "Prunecli"
"""Before the class in a result that no stock class can run, so that other programs do not take it for one."""
LARGEST = 1 << 48
"""A config.json that names a larger size is damaged."""
MOST_LAYERS = 100_000
"""A config.json that names more is damaged; every walk over its layers would seem to hang."""
REMEDY = "config.json and the weights are not of one checkpoint; copy both again."
SHARED_LAYERS = 1000
"""Layers or experts that a model may have with fewer tensors: layers may share them (ALBERT), experts be stacked."""

EXPERTS = re.compile(r"^(?!top_?k).*(?<!shared_)experts$")
"""Keys of numbers of experts that are routed to."""

_OUTER = re.compile(
    r"(vision|image|video)_|((torch_)?d|model_)type$|architectures$|transformers_version$|tie_word_embeddings$|"
    r"quantization_config$|auto_map$"
)
"""Keys of the config of a model of text and images that say nothing of its text model."""

_ROUNDS_WIDTH = "block_auto_adjust_ff_dim"


@dataclass(frozen=True)
class Sizes:
    """Counts, conditions and ties of a family's record for one config.json.

    Attributes:
        family: the declared family.
        config: config.json.
    """

    family: Architecture
    config: Mapping[str, Any]

    def value(self, key: str) -> Any:
        """A key of config.json, or transformers' default where it is left out.

        A null stands for what a class that was asked made of it.

        Raises:
            CheckpointError: neither has it.
        """
        default, stated = self.family.attributes.get(key), value_of(self.config, key)
        if stated is not None or (key in self.config and (default is None or self.family.found is None)):
            return stated
        if default is not None:
            return default
        raise CheckpointError(
            f'config.json lacks "{key}", which a model of type {self.family.model_type} needs'
        )

    def count(self, key: str) -> int:
        """A whole number of config.json, or transformers' default.

        Raises:
            CheckpointError: it is absent or no count.
        """
        value = self.value(key)
        if type(value) is not int or value < 0:
            raise CheckpointError(f'config.json: "{key}" is {value!r}, not a count')
        if value > LARGEST:
            raise CheckpointError(f'config.json: "{key}" is {value}; no model is so large')
        return value

    def states(self, key: str) -> bool:
        """Whether config.json itself holds a value under `key`, which may lie within others: `text_config.top_k`."""
        return value_of(self.config, key) is not None

    def even(self, key: str) -> int:
        """A count that config.json states once, or for every layer alike.

        Raises:
            CheckpointError: it is no count, or layers differ.
        """
        stated = value_of(self.config, key)
        if isinstance(stated, list) and stated and all(value == stated[0] for value in stated):
            stated = stated[0]
        if type(stated) is not int or not 0 <= stated <= LARGEST:
            raise CheckpointError(f'config.json: "{key}" is {stated!r}, not a count')
        return stated

    def depth(self, stack: Stack) -> int:
        """The number of layers of a stack.

        Raises:
            CheckpointError: a key that is absent, no count, or of more layers than any model has.
        """
        value = self.value(stack.depth)
        layers = len(value) if isinstance(value, list) else self.count(stack.depth)
        if layers > MOST_LAYERS:
            raise CheckpointError(f'config.json: "{stack.depth}" is {layers}; no model has so many layers')
        return layers

    def holds(self, condition: str | None) -> bool:
        """Whether a key is true, or begins with the text after a colon; None always holds."""
        if condition is None:
            return True
        key, _, beginning = condition.partition(":")
        value = self.value(key)
        return str(value).startswith(beginning) if beginning else bool(value)

    def those_of(
        self, stack: Stack, structure: Structure, number: int, specs: Iterable[TensorSpec], owner: str = ""
    ) -> tuple[TensorSpec, ...]:
        """Return those of the tensors that a layer has.

        Args:
            structure: of the model.
            number: of the layer in the model.
            owner: of the tensors, as a beginning of names relative to the layer.
        """
        if (found := self.family.found) is not None:
            return tuple(
                spec for spec in specs if found.holds(stack, structure, number, f"{owner}{spec.name}")
            )
        return tuple(spec for spec in specs if self.holds(spec.optional))

    def ties(self) -> dict[str, str]:
        """Alias -> stored name of the tensors that are one in a stock model."""
        if not self.family.loose or self.value(TIE_KEY):
            return self.family.tied
        return {alias: name for alias, name in self.family.tied.items() if alias not in self.family.loose}

    def layers(self, stack: Stack) -> Iterator[tuple[int, str]]:
        """Number and name of each layer of a stack."""
        return ((number, stack.layers.format(layer=number)) for number in range(self.depth(stack)))


def value_of(values: Mapping[str, Any], key: str) -> Any:
    """The value under a key, which may lie within others; None: there is none."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json on the language model: all of it, or what a model of text and images keeps apart."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def with_keys(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with these values; a key may lie within others (`text_config.top_k`), a list keeps its length."""
    changed = dict(config)
    for key, value in values.items():
        outer, dot, inner = key.partition(".")
        if dot and isinstance(changed.get(outer), Mapping):
            changed[outer] = with_keys(changed[outer], {inner: value})
        else:
            before = changed.get(key)
            changed[key] = (
                [value] * len(before) if isinstance(before, list) and isinstance(value, int) else value
            )
    return changed


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with its type, and the sizes of its model, where and as other models state them.

    Results of prunecli 0.1 that no stock class runs have a type of their own. Files of Qwen2-VL have the sizes of the
    text model at the top instead of under `text_config`. LFM2's say the width of FFNs before it is multiplied and
    rounded, under one of two names.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type.startswith(REDUCED_PREFIX):
        return {WEIGHTS_KEY: "", **config, "model_type": model_type.removeprefix(REDUCED_PREFIX)}
    if model_type in ("qwen2_vl", "qwen2_5_vl") and "text_config" not in config:
        outer = {key: value for key, value in config.items() if _OUTER.match(key)}
        text = {key: value for key, value in config.items() if key not in outer}
        return {**outer, "text_config": {**text, "model_type": f"{model_type}_text"}}
    width = config.get("block_ff_dim", config.get("intermediate_size"))
    if model_type == "lfm2" and type(width) is int and config.get(_ROUNDS_WIDTH, True):
        width = 2 * width // 3
        if (factor := config.get("block_ffn_dim_multiplier", 1.0)) is not None:
            multiple = config.get("block_multiple_of", 256)
            width = multiple * math.ceil(int(factor * width) / multiple)
        others = {key: value for key, value in config.items() if key != "block_ff_dim"}
        return {**others, "intermediate_size": width, _ROUNDS_WIDTH: False}
    return dict(config)


def all_items(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values of a config.json and of the objects in it."""
    for values in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        yield from values.items()


def counts_beyond(config: Mapping[str, Any], most: int) -> dict[str, int]:
    """Key -> how many layers or experts it states, of those in a config.json, and in its objects, beyond `most`."""
    return {
        key: count
        for key, count in all_items(config)
        if (key.endswith(("layers", "n_layer")) or EXPERTS.search(key))
        and isinstance(count, int)
        and count > most
    }


def counts_experts(config: Mapping[str, Any]) -> bool:
    """Whether a key of config.json, or of an object in it, seems to count experts that a router chooses from.

    Raises:
        CheckpointError: the value of such a key is a text.
    """
    found = {key: value for key, value in all_items(config) if EXPERTS.search(key)}
    for key, value in found.items():
        if isinstance(value, str):
            raise CheckpointError(f'config.json: "{key}" is {value!r}, not a count')
    return bool(found)


def class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The classes of transformers that config.json names; none where it names none in the usual form."""
    names = config.get("architectures")
    return tuple(str(name).removeprefix(CLASS_PREFIX) for name in names) if isinstance(names, list) else ()
