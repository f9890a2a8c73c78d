"""Groups of languages, such as resource classes: which one each language is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from prunecli.errors import DataError
from prunecli.tensors.json_files import read_json
from prunecli.text.lines import read_lines

FORM = "Give lines of a language, a tab and its group, or a JSON object {language: group}."


def read_groups(path: Path) -> dict[str, str]:
    """Read language -> group: a JSON object where the name ends in `.json`, else lines `eng_Latn<TAB>high`.

    Raises:
        DataError: no such file, an empty one, or a line that is neither; a language in two groups.
    """
    groups: dict[str, str] = {}
    if path.suffix.lower() == ".json":
        groups = read_json(path, error=DataError)
        if not isinstance(groups, dict) or not all(
            isinstance(group, str) and group for group in groups.values()
        ):
            raise DataError(f"{path}: not an object of language: group", FORM)
    else:
        try:
            lines = read_lines(path)
        except DataError as error:
            raise DataError(error.message, FORM) from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            language, _, group = (part.strip() for part in line.partition("\t"))
            if not language or not group or "\t" in group:
                raise DataError(f"{path}: line {number} is not a language, a tab and a group: {line!r}", FORM)
            if groups.setdefault(language, group) != group:
                raise DataError(f"{path}: line {number}: {language} is in {groups[language]} already", FORM)
    if not groups:
        raise DataError(f"{path}: no language", FORM)
    return groups


def groups_of(languages: Iterable[str], groups: Mapping[str, str], name: Path | str) -> dict[str, str]:
    """Those of `groups` that `languages` are in, in the file's order; `name` is what messages call it.

    Raises:
        DataError: languages that the file lacks.
    """
    asked = set(languages)
    if lacking := sorted(asked - set(groups)):
        raise DataError(
            f"{name}: no group for {', '.join(lacking)}", "Add a line for each, or choose pairs without them."
        )
    return {language: group for language, group in groups.items() if language in asked}
