"""Text that is aligned by line: one file per language, one sentence per line; and groups of languages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

from prunecli.errors import DataError, UsageError
from prunecli.tensors.json_files import read_json
from prunecli.text.files import PACKED, lines_sha256, near_names, read_lines, require_count

Pairs = tuple[tuple[str, str], ...]
"""Directions of translation, (source, target)."""
_LANGUAGE = re.compile(r"[A-Za-z]{2,8}([_-][A-Za-z0-9]+)*")


@dataclass(frozen=True)
class ParallelText:
    """The sentences of one split.

    Attributes:
        split: its name, or that of the files it was read from.
        sentences: language -> lines, all of one length; line i of each language says the same. Blank lines
            are kept, as empty sentences, so that the languages stay aligned.
    """

    split: str
    sentences: Mapping[str, tuple[str, ...]]

    def __len__(self) -> int:
        return len(next(iter(self.sentences.values()), ()))

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages, in the order in which they were asked for."""
        return tuple(self.sentences)

    @property
    def sha256(self) -> str:
        """A hash of the sentences, whatever the order of the languages."""
        return lines_sha256([lines_sha256(self.sentences[name]) for name in sorted(self.sentences)])

    def first(self, count: int | None) -> ParallelText:
        """The first `count` sentences; all of them where it is None.

        Raises:
            DataError: there are fewer.
        """
        require_count(count, len(self), "sentences", self.split)
        return self.cut(slice(count))

    def cut(self, rows: slice) -> ParallelText:
        """Some of the sentences."""
        return replace(self, sentences={name: lines[rows] for name, lines in self.sentences.items()})


def pair_name(source: str, target: str) -> str:
    """The name of a direction: `eng_Latn-fra_Latn`."""
    return f"{source}-{target}"


def parse_pairs(pairs: Sequence[str] | None, langs: Sequence[str] | None, available: Sequence[str]) -> Pairs:
    """Directions (source, target) from the options `pairs` and `langs`, each once, in the order given.

    Args:
        pairs: ("a-b", "c-d"), or None.
        langs: ("a", "b", "c") for all directions between them, or None. With neither: all between `available`.
        available: the languages that there are.

    Raises:
        UsageError: a pair is not of the form a-b, or no pair is left.
        DataError: a language is not among `available`.
    """
    directions: list[tuple[str, str]] = []
    if pairs is None:
        names = available if langs is None else langs
        for name in names:
            _check_language(name, available)
        directions = [*permutations(dict.fromkeys(names), 2)]
    for text in pairs or ():
        # A language code may hold a hyphen itself, so that the place of the cut is known by the languages.
        cuts = [(text[:i], text[i + 1 :]) for i, letter in enumerate(text) if letter == "-"]
        cuts = [(source, target) for source, target in cuts if source and target]
        if not cuts:
            raise UsageError(
                f"{text!r} is not a language pair", "Write SOURCE-TARGET, such as eng_Latn-fra_Latn."
            )
        source, target = next((cut for cut in cuts if cut[0] in available and cut[1] in available), cuts[0])
        _check_language(source, available)
        _check_language(target, available)
        if source == target:
            raise UsageError(f"{text!r}: source and target are the same language")
        directions.append((source, target))
    if not directions:
        raise UsageError(
            "no language pair: a pair needs two languages", "Give `pairs=a-b`, or `langs` with two or more."
        )
    return tuple(dict.fromkeys(directions))


def _check_language(name: str, available: Sequence[str]) -> None:
    if name not in available:
        raise DataError(f"unknown language {name!r}: there is no text in it", near_names(name, available))


def languages_of(directory: Path, split: str) -> tuple[str, ...]:
    """The languages that `split` has text in, sorted.

    Raises:
        DataError: no such directory, or no such split (the message lists the splits that there are).
    """
    return tuple(_language_files(directory, split))


def has_split(directory: Path, split: str) -> bool:
    """Whether there is text of `split` in `directory`."""
    return split in _splits(directory)


def read_parallel(directory: Path, split: str, languages: Sequence[str] | None = None) -> ParallelText:
    """Read one split: `SPLIT.LANG` (`val.eng_Latn`), or FLORES-200's `SPLIT/LANG.SPLIT` (`dev/eng_Latn.dev`).

    Either may be packed (`val.eng_Latn.gz`); where a file is there twice, the unpacked one is read.

    Args:
        directory: where the files lie.
        split: such as "val".
        languages: those to read; None: all that there are.

    Raises:
        DataError: no such directory, split or language; an empty file; a file that is not UTF-8; files of
            different line counts.
    """
    files = _language_files(directory, split)
    names = tuple(files) if languages is None else tuple(dict.fromkeys(languages))
    for name in names:
        if name not in files:
            raise DataError(f"{directory}: split {split!r} has no text in {name!r}", near_names(name, files))
    return _aligned(split, {name: files[name] for name in names})


def read_pair(source: Path, target: Path, pairs: Sequence[str]) -> ParallelText:
    """Read the two files of one direction; `pairs` names their languages (`eng_Latn-fra_Latn`).

    Raises:
        UsageError: `pairs` is not one direction.
        DataError: as `read_parallel`.
    """
    halves = pairs[0].split("-") if len(pairs) == 1 else []
    if len(halves) != 2 or not all(halves) or halves[0] == halves[1]:
        raise UsageError(
            f"{','.join(pairs)!r} does not name the languages of the two files",
            "Write one pair SOURCE-TARGET, such as `pairs=eng_Latn-fra_Latn`.",
        )
    return _aligned(source.name, {halves[0]: source, halves[1]: target})


def _aligned(split: str, files: Mapping[str, Path]) -> ParallelText:
    sentences = {name: read_lines(path) for name, path in files.items()}
    names = list(sentences)
    for name in names[1:]:
        first, here = len(sentences[names[0]]), len(sentences[name])
        if here != first:
            raise DataError(
                f"{files[names[0]]} has {first:,} lines, {files[name]} has {here:,}",
                "Aligned files have as many lines, one sentence per line; blank lines count.",
            )
    return ParallelText(split, sentences)


def _language_files(directory: Path, split: str) -> dict[str, Path]:
    if not directory.is_dir():
        what = "a file, not a directory" if directory.exists() else "no such directory"
        raise DataError(f"{directory}: {what}", "Name a directory of files SPLIT.LANG with `data`.")
    found = _splits(directory)
    files = found.get(split)
    if not files:
        splits = [name for name, files in found.items() if len(files) > 1]
        raise DataError(
            f"{directory}: no split {split!r} (no files {split}.LANG nor {split}/LANG.{split})",
            near_names(split, splits, "Splits found"),
        )
    return dict(sorted(files.items()))


def _splits(directory: Path) -> dict[str, dict[str, Path]]:
    """Split -> language -> file. `SPLIT/LANG.SPLIT` comes before `SPLIT.LANG`, an unpacked file before a packed one."""
    splits: dict[str, dict[str, Path]] = {}
    for path in (*sorted(directory.glob("*/*")), *sorted(directory.glob("*"))):
        is_inside = path.parent != directory
        first, _, last = path.name.removesuffix(PACKED).rpartition(".")
        language, split = (first, last) if is_inside else (last, first)
        is_split = not is_inside or split == path.parent.name
        if is_split and _LANGUAGE.fullmatch(language) and path.is_file():
            splits.setdefault(split, {}).setdefault(language, path)
    return splits


FORM = "Give lines of a language, a tab and its group, or a JSON object {language: group}."


def read_groups(path: Path) -> dict[str, str]:
    """Read language -> group: a JSON object where the name ends in `.json`, else lines `eng_Latn<TAB>high`.

    Raises:
        DataError: no such file, an empty one, or a line that is neither; a language in two groups.
    """
    groups = {}
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
    """The entries of `groups` for `languages`, in the file's order; `name` is the file's name for messages.

    Raises:
        DataError: languages that the file lacks.
    """
    asked = set(languages)
    if lacking := sorted(asked - set(groups)):
        raise DataError(
            f"{name}: no group for {', '.join(lacking)}", "Add a line for each, or choose pairs without them."
        )
    return {language: group for language, group in groups.items() if language in asked}
