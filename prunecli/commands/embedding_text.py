"""The text in which `factorize-embeddings` counts tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.commands.found import chosen_splits
from prunecli.commands.options import listed
from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.methods.embeddings.source import Text


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
        splits, found = chosen_splits(data, split), listed("--langs", langs)
        for name in splits:
            lines += _lines(data, name, found)
        described |= {"split": list(splits), "langs": list(found) or None}
    if files:
        from prunecli.text.plain import read_plain

        plain = read_plain(files)
        lines += plain.texts
        described |= {"text": [path.name for path in plain.files], "text_sha256": plain.sha256}
    return Text(lines, described | {"lines": len(lines)}) if lines else None


def _lines(data: Path, split: str, languages: tuple[str, ...]) -> list[str]:
    from prunecli.text.parallel import languages_of, read_parallel

    text = read_parallel(data, split, languages or languages_of(data, split))
    return [line for lines in text.sentences.values() for line in lines if line.strip()]
