"""What a family's record means for one config.json: values, counts, conditions and tied names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prunecli.architectures import Architecture
from prunecli.errors import CheckpointError

TIE_KEY = "tie_word_embeddings"
CLASS_PREFIX = "Prunecli"
"""Before the class in a result that no stock class can run, so that other programs do not take it for one."""
LARGEST = 1 << 48
"""A config.json that names a larger size is damaged."""
MOST_LAYERS = 100_000
"""A config.json that names more is damaged; every walk over its layers would seem to hang."""


def config_value(family: Architecture, config: Mapping[str, Any], key: str) -> Any:
    """A key of config.json, or the default of transformers where it is left out; a null stands for a default in words.

    Raises:
        CheckpointError: neither has it.
    """
    default = family.attributes.get(key)
    if key in config and (config[key] is not None or not isinstance(default, str)):
        return config[key]
    if default is not None:
        return default
    raise CheckpointError(f'config.json lacks "{key}", which a model of type {family.model_type} needs')


def class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The classes of transformers that config.json names; none where it names none in the usual form."""
    names = config.get("architectures")
    return tuple(str(name).removeprefix(CLASS_PREFIX) for name in names) if isinstance(names, list) else ()


def count(family: Architecture, config: Mapping[str, Any], axis: str) -> int:
    """The length of a declared axis: a key, a number, or a sum, product or quotient of such, read from left to right.

    Raises:
        CheckpointError: a key that is absent or no count, or a quotient that is not whole.
    """
    first, *rest = re.split(r"([*/+])", axis)
    value = _factor(family, config, first)
    for operator, name in zip(rest[::2], rest[1::2], strict=True):
        other = _factor(family, config, name)
        if operator == "*":
            value *= other
        elif operator == "+":
            value += other
        elif other == 0 or value % other:
            raise CheckpointError(f"config.json: {axis} is {value} / {other}, not a whole number")
        else:
            value //= other
    return value


def depth(family: Architecture, config: Mapping[str, Any], key: str) -> int:
    """The number of layers of a stack, under its config key.

    Raises:
        CheckpointError: a key that is absent, no count, or of more layers than any model has.
    """
    layers = count(family, config, key)
    if layers > MOST_LAYERS:
        raise CheckpointError(f'config.json: "{key}" is {layers}; no model has so many layers')
    return layers


def holds(family: Architecture, config: Mapping[str, Any], condition: str | None) -> bool:
    """Whether a declared condition is met; None always is."""
    if condition is None:
        return True
    if "&" in condition:
        return all(holds(family, config, part) for part in condition.split("&"))
    if condition.startswith("!"):
        return not holds(family, config, condition[1:])
    if "=" in condition:
        one, other = condition.split("=")
        return count(family, config, one) == count(family, config, other)
    key, colon, beginning = condition.partition(":")
    value = config_value(family, config, key)
    return str(value).startswith(beginning) if colon else bool(value)


def ties(family: Architecture, config: Mapping[str, Any]) -> dict[str, str]:
    """Alias -> stored name of the tensors that are one in a model of this config."""
    if not family.loose or config_value(family, config, TIE_KEY):
        return family.tied
    return {alias: name for alias, name in family.tied.items() if alias not in family.loose}


def _factor(family: Architecture, config: Mapping[str, Any], name: str) -> int:
    if name.isdecimal():
        return int(name)
    value = config_value(family, config, name)
    if isinstance(value, str) and value == family.attributes.get(name):
        return count(family, config, value)  # a default that follows from other keys
    if type(value) is not int or value < 0:
        raise CheckpointError(f'config.json: "{name}" is {value!r}, not a count')
    if value > LARGEST:
        raise CheckpointError(f'config.json: "{name}" is {value}; no model is so large')
    return value
