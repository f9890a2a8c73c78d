"""Token ids in config.json and generation_config.json: found, and renumbered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunecli.errors import UsageError
from prunecli.model.structure import KEY

_ENDINGS = ("_token_id", "_token_ids")
_NEEDED = ("forced_decoder_ids", "force_words_ids")
"""Lists of ids that generation puts out; those of `forced_decoder_ids` come after their place: [[1, 250]]."""
_FORBIDDEN = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
"""Lists of ids that generation must not put out, alone or as sequences: what is gone needs no ban."""
_BIASES = "sequence_bias"
"""[[[ids], bias], …]."""
_NOT_ENTERED = (KEY, "id2label", "label2id", "auto_map")


@dataclass(frozen=True)
class Renumbering:
    """Which tokens stay, under which ids.

    Attributes:
        new_ids: id -> new id, of those that stay.
        dropped: the tokens that go.
        size: ids before.
    """

    new_ids: Mapping[int, int]
    dropped: frozenset[str]
    size: int

    def new(self, number: int) -> int:
        """The new id of a token that must stay.

        Raises:
            UsageError: it would go.
        """
        if number not in self.new_ids:
            raise UsageError(
                f"The token of id {number} is special, and would go.",
                "Keep every special and added token, and those that the configs name.",
            )
        return self.new_ids[number]


def named_ids(document: Mapping[str, Any]) -> Iterator[int]:
    """The ids that a config needs: `pad_token_id`, `forced_bos_token_id`, `forced_decoder_ids` and their like."""
    for key, value in document.items():
        if key.endswith(_ENDINGS) or key in _NEEDED:
            yield from _numbers([step[1:] for step in value] if _is_placed(key, value) else value)
        elif isinstance(value, Mapping) and key not in _NOT_ENTERED:
            yield from named_ids(value)


def renumbered(document: Mapping[str, Any], change: Renumbering) -> dict[str, Any]:
    """The config with new ids; bans and biases of tokens that are gone go with them.

    Args:
        document: config.json or generation_config.json. A number outside of the old vocabulary is no token's id and
            stays (-1 for none).
        change: the new ids.

    Raises:
        UsageError: an id that the config needs would go.
    """
    result: dict[str, Any] = {}
    for key, value in document.items():
        if key in _FORBIDDEN and isinstance(value, list):
            kept = [item for item in value if _is_kept(item, change)]
            # transformers refuses an empty list where it expects sequences.
            result[key] = _mapped(kept, change) if kept or not value else None
        elif key == _BIASES and isinstance(value, list):
            pairs = [[_mapped(ids, change), bias] for ids, bias in value if _is_kept(ids, change)]
            result[key] = pairs or None
        elif _is_placed(key, value):
            result[key] = [[step[0], *_mapped(step[1:], change)] for step in value]
        elif key.endswith(_ENDINGS) or key in _NEEDED:
            result[key] = _mapped(value, change)
        elif isinstance(value, Mapping) and key not in _NOT_ENTERED:
            result[key] = renumbered(value, change)
        else:
            result[key] = value
    return result


def with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the ids that it leaves to the defaults of its class, written out."""
    left = {key: value for key, value in defaults.items() if key.endswith(_ENDINGS) and key not in config}
    return {**config, **{key: value for key, value in left.items() if value is not None}}


def _is_placed(key: str, value: Any) -> bool:
    return key == "forced_decoder_ids" and isinstance(value, list)


def _numbers(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _numbers(item)


def _is_kept(value: Any, change: Renumbering) -> bool:
    return all(number in change.new_ids or not 0 <= number < change.size for number in _numbers(value))


def _mapped(value: Any, change: Renumbering) -> Any:
    if type(value) is int:
        return change.new(value) if 0 <= value < change.size else value
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value
