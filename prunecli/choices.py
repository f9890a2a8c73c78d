"""What a program gives as options: words that are checked where the options are made, and paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from prunecli.errors import UsageError


class Choices:
    """A frozen dataclass whose fields of `Literal[…]`, and of tuples of it, hold no other word."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UsageError: another word.
        """
        for name, words in _words(type(self)).items():
            value = getattr(self, name)
            for word in value if isinstance(value, tuple | list) else (value,):
                if word is not None and word not in words:
                    raise UsageError(f"{name}={word!r}: no such choice", f"Choose one of {', '.join(words)}.")


def paths(files: Path | str | Sequence[Path | str]) -> tuple[Path, ...]:
    """One file, or several."""
    return (Path(files),) if isinstance(files, Path | str) else tuple(map(Path, files))


def _words(kind: type) -> Mapping[str, tuple[str, ...]]:
    """Field -> its words, of those that have some and nothing else."""
    found = {name: _of(hint) for name, hint in get_type_hints(kind).items()}
    return {name: words for name, words in found.items() if words}


def _of(hint: Any) -> tuple[str, ...]:
    """The words of a type; none where it has other values too."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = [part for part in get_args(hint) if part not in (type(None), Ellipsis)]
    if get_origin(hint) in (Union, UnionType, tuple) and len(parts) == 1:
        return _of(parts[0])
    return ()
