"""Files of text that are given with a name, `--text NAME=FILE`: what is measured is told apart by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prunecli.errors import UsageError
from prunecli.text.hub_data import is_hub_data, parse_hub_data

_FORM = "Write --text FILE, or --text NAME=FILE."


@dataclass(frozen=True)
class TextFile:
    """A file of text, or a data set of the hub.

    Attributes:
        name: that was given to it; several files may have one and are one text then. None: none was given.
    """

    path: Path
    name: str | None = None


def parse_text_file(value: str) -> TextFile:
    """`FILE` or `NAME=FILE`; where a file is called like the whole of it, it is that file.

    What stands before the first `=` is no name where there is a `/` in it. A file may be `hf://…`, a data set.

    Raises:
        UsageError: an empty name or file, a name with a comma, which separates names elsewhere, or a data set that is
            named in another form.
    """
    name, equals, file = value.partition("=")
    if is_hub_data(value) or is_hub_data(file):
        parse_hub_data(value if is_hub_data(value) else file)
    if not equals or "/" in name or Path(value).is_file():
        return TextFile(Path(value))
    name = name.strip()
    if not name or not file:
        raise UsageError(f"--text {value}: no {'file' if name else 'name'}", _FORM)
    if "," in name:
        raise UsageError(f"--text {value}: a comma in the name {name!r}", "Choose a name without one.")
    return TextFile(Path(file), name)


def names_of(files: Sequence[TextFile]) -> tuple[str, ...]:
    """The name of each file: the one that was given, else the file's own without its endings, or the data set's.

    Two files without names whose own are the same, or one with the name that another was given, have their whole path.
    """
    own = [
        parse_hub_data(path).name.rpartition("/")[2]
        if is_hub_data(path)
        else path.name.lstrip(".").split(".")[0] or path.name
        for path in (file.path for file in files)
    ]
    taken = [one if file.name is None else file.name for one, file in zip(own, files, strict=True)]
    return tuple(
        str(file.path) if file.name is None and taken.count(name) > 1 else name
        for name, file in zip(taken, files, strict=True)
    )


def given_names(files: Sequence[TextFile]) -> tuple[str, ...]:
    """`names_of` where any name was given; else empty."""
    return names_of(files) if any(file.name is not None for file in files) else ()
