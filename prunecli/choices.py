"""What a program gives as options: words that are checked where the options are made, and paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from prunecli.errors import UsageError

RENAMED: Mapping[str, Mapping[str, str]] = {
    "prune-experts": {"--experts": "--keep", "--round-to": "--multiple-of", "--min-per-layer": "--min"},
    "prune-heads": {"--heads": "--keep", "--min-per-layer": "--min"},
    "prune-ffn": {"--score": "--metric", "--round-to": "--multiple-of", "--per-layer": "--uneven"},
    "prune-layers": {"--layers": "--remove"},
    "compare-languages": {"--min-per-layer": "--min"},
    "inspect": {"--round-to": "--multiple-of"},
}
"""Command -> option of 0.2.0 -> its present name. The command line and recipes take both names for one release."""


def present_name(command: str, word: str, say: Callable[[str], None]) -> str:
    """Return an option (`--round-to` or `--round-to=8`) by its present name; `say` is called with a line about it."""
    option, equals, value = word.partition("=")
    name = RENAMED.get(command, {}).get(option, option)
    if name != option:
        say(f"{option} is called {name} now.")
    return name + equals + value


class Choices:
    """A frozen dataclass of options, as commands and programs give them.

    A field of a path takes text, one of a tuple any sequence, or one name alone. Fields of `Literal[…]`, and of tuples
    of it, hold no other word.
    """

    def __post_init__(self) -> None:
        """Take the fields, and check them.

        Raises:
            UsageError: another word; what is no path.
        """
        for name, hint in get_type_hints(type(self)).items():
            given = getattr(self, name)
            value = _taken(name, hint, given)
            if value is not given:
                object.__setattr__(self, name, value)
            words = _of(hint)
            for word in value if isinstance(value, tuple) else (value,):
                if words and word is not None and word not in words:
                    raise UsageError(f"{name}={word!r}: no such choice", f"Choose one of {', '.join(words)}.")


def paths(files: Path | str | Sequence[Path | str]) -> tuple[Path, ...]:
    """One file, or several."""
    return (Path(files),) if isinstance(files, Path | str) else tuple(map(Path, files))


def _taken(name: str, hint: Any, value: Any) -> Any:
    """`value` as a field of that type holds it."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None or (isinstance(value, str) and str in parts):
        return value
    row = next((part for part in parts if get_origin(part) is tuple), None)
    if row is not None and isinstance(value, Sequence | Path):
        inner = get_args(row)
        several = (value,) if isinstance(value, str | Path) else value
        return tuple(_taken(name, inner[0], one) for one in several) if Ellipsis in inner else tuple(several)
    if set(parts) <= {Path, type(None)} and not isinstance(value, Path):
        if not isinstance(value, str):
            raise UsageError(f"{name}={value!r}: no path", "Give a Path, or its text.")
        return Path(value)
    return value


def _of(hint: Any) -> tuple[str, ...]:
    """The words of a type; none where it has other values too."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = [part for part in get_args(hint) if part not in (type(None), Ellipsis)]
    if get_origin(hint) in (Union, UnionType, tuple) and len(parts) == 1:
        return _of(parts[0])
    return ()
