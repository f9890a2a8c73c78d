"""The text in which `factorize-embeddings` counts tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.errors import DataError, UsageError

if TYPE_CHECKING:
    from prunecli.methods.embeddings.source import Text

SPLITS = ("train", "val", "dev")
"""Read where no --split is given, those that there are."""


def read_text(
    data: Path | None, split: str | None, langs: str | None, files: tuple[Path, ...]
) -> Text | None:
    """Lines of splits of a directory, and of files; None where neither is given.

    Raises:
        UsageError: options that go with a directory, without one.
        DataError: no such directory, split, language or file; an empty one, or one that is not UTF-8.
    """
    from prunecli.methods.embeddings.source import Text

    if data is None and (split is not None or langs is not None):
        raise UsageError("--split and --langs go with --data.", "Name a directory of text with --data.")
    lines: list[str] = []
    described: dict[str, Any] = {}
    if data is not None:
        splits, found = _splits(data, split), _names("--langs", langs)
        for name in splits:
            lines += _lines(data, name, found)
        described |= {"split": list(splits), "langs": list(found) or None}
    if files:
        from prunecli.data.plain import read_plain

        plain = read_plain(files)
        lines += plain.texts
        described |= {"text": [path.name for path in plain.files], "text_sha256": plain.sha256}
    return Text(lines, described | {"lines": len(lines)}) if lines else None


def _lines(data: Path, split: str, languages: tuple[str, ...]) -> list[str]:
    from prunecli.data.parallel import languages_of, read_parallel

    text = read_parallel(data, split, languages or languages_of(data, split))
    return [line for lines in text.sentences.values() for line in lines if line.strip()]


def _splits(data: Path, split: str | None) -> tuple[str, ...]:
    from prunecli.data.parallel import languages_of

    if split is not None:
        return _names("--split", split)
    found = []
    for name in SPLITS:
        try:
            languages_of(data, name)
        except DataError:
            continue
        found.append(name)
    return tuple(found) or SPLITS[:1]


def _names(option: str, text: str | None) -> tuple[str, ...]:
    """`a, b` -> (a, b), each once."""
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise UsageError(f"{option} {text!r}: an empty name.", "Separate names by single commas.")
    return names
