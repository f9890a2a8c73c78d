"""Plain text for language models: texts of files, and documents and chats under a name."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prunecli.errors import DataError, UsageError, reason_of
from prunecli.progress import Say, unsaid
from prunecli.tensors.quantities import counted
from prunecli.text.files import (
    CHARACTERS,
    Chat,
    TextFile,
    is_hub_data,
    is_json_lines,
    lines_sha256,
    names_of,
    near_names,
    parsed_line,
    read_hub_data,
    read_json_lines,
    read_lines,
    require_count,
)
from prunecli.text.tokens import Tokenizer, require_rows, tokenized


@dataclass(frozen=True)
class PlainText:
    """Texts, in the order of the files and of their lines.

    Attributes:
        files: where they are from.
        texts: without line ends at their ends; none is blank.
        names: of each text, the one that its file was given; empty: none was.
        whole_files: each file of plain text is one text; else each of its lines is.
    """

    files: tuple[Path, ...]
    texts: tuple[str, ...]
    names: tuple[str, ...] = ()
    whole_files: bool = False

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def sha256(self) -> str:
        """A hash of the texts."""
        return lines_sha256(self.texts)

    @property
    def by_name(self) -> dict[str, list[int]]:
        """Name -> the numbers of its texts; empty where there are no names."""
        found: dict[str, list[int]] = {}
        for number, name in enumerate(self.names):
            found.setdefault(name, []).append(number)
        return found

    def first(self, count: int) -> PlainText:
        """The first `count` texts.

        Raises:
            DataError: there are fewer.
        """
        require_count(count, len(self), "texts", ", ".join(map(str, self.files)), "there are")
        return self.cut(slice(count))

    def cut(self, rows: slice) -> PlainText:
        """Some of the texts."""
        return replace(self, texts=self.texts[rows], names=self.names[rows])


MIXED = "Warning: of the files that are added up, some read whole documents and others single lines."
"""What is told of statistics of both kinds."""


def read_plain(
    files: Sequence[Path],
    *,
    whole_files: bool = False,
    names: Sequence[str] = (),
    max_sentences: int | None = None,
) -> PlainText:
    r"""Read UTF-8 text without byte order marks; `\r\n` ends a line as `\n` does.

    Files of `JSON_LINES` hold objects whose `text` is one text; `hf://…` is a data set of the hub.

    Args:
        files: in the order in which they are to be read.
        whole_files: each file is one text, with its line ends and blank lines except those at its end; else each line
            that is not blank is one.
        names: of each file; empty: they have none.
        max_sentences: read the first so many lines that are not blank (of JSON lines and data sets: texts), of each
            name where there are names, whether or not a file is one text; None: all.

    Raises:
        UsageError: no file is given, or a data set without a bound.
        PruneError: a data set, and `datasets` is not installed.
        DataError: no such file, an empty one, or one that is not UTF-8 (with the line), or a chat; fewer than
            `max_sentences`.
    """
    if not files:
        raise UsageError("no file of text was given", "Name one or more with `files`.")
    paths = tuple(files)
    texts = []
    owners: list[str] = []
    read: Counter[str] = Counter()
    for path, name in zip(paths, names or [""] * len(paths), strict=True):
        rows: Sequence[str]
        if is_plain(path):
            rows = read_lines(path)
        else:
            documents = read_hub_data(path) if is_hub_data(path) else read_json_lines(path)
            rows = [one for one in documents if isinstance(one, str) and one.strip()]
            held = "no text" if all(isinstance(one, str) for one in documents) else "chats"
            if not rows or held == "chats":
                raise DataError(f"{path}: holds {held}; texts are needed here", 'A line is {"text": "…"}.')
        filled = [number for number, row in enumerate(rows) if row.strip()]
        filled = filled[: None if max_sentences is None else max_sentences - read[name]]
        read[name] += len(filled)
        if whole_files and is_plain(path):
            texts += ["\n".join(rows[: filled[-1] + 1])] if filled else []
        else:
            texts += [rows[number] for number in filled]
        owners += [name] * (len(texts) - len(owners))
    for name, present in read.items():
        what = "lines" if whole_files else "texts"
        require_count(max_sentences, present, what, name or ", ".join(map(str, paths)), "there are")
    return PlainText(paths, tuple(texts), tuple(owners) if names else (), whole_files)


def bounded(texts: Sequence[str], max_tokens: int) -> tuple[str, ...]:
    """The first `CHARACTERS` x `max_tokens` characters of `texts`, which hold `max_tokens` tokens of most texts."""
    left = CHARACTERS * max_tokens
    kept = []
    for text in texts:
        if left <= 0:
            break
        kept.append(text[:left])
        left -= len(text)
    return tuple(kept)


def is_plain(path: Path) -> bool:
    """Whether a file is neither JSON lines nor a data set of the hub."""
    return not is_hub_data(path) and not is_json_lines(path)


def say_convention(files: Sequence[Path], say: Say, *, whole_files: bool) -> None:
    """Say what a text of `files` is, with the option for the other, if any of them is plain."""
    count = sum(map(is_plain, files))
    how = ", each line a text (`whole_files` takes each file as one text)"
    if whole_files:
        what = "a whole document" if count == 1 else "whole documents"
        how = f" as {what} (`whole_files=False` takes each line as a text)"
    if count:
        say(f"Text: {counted(count, 'file')}{how}.")


AT_ONCE = 1 << 8
"""Texts that are tokenised at a time."""


@dataclass(frozen=True)
class Corpus:
    """The text of one name.

    Attributes:
        name: under which it is measured.
        files: where it is from.
        documents: texts and chats, in the order of the files and of their lines.
        whole_files: each file of plain text is one document, or each of its lines is; None: not known.
    """

    name: str
    files: tuple[Path, ...]
    documents: tuple[str | Chat, ...]
    whole_files: bool | None = None

    @property
    def sha256(self) -> str:
        """A hash of the documents."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(json.dumps(document, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()


def read_corpora(
    files: Sequence[TextFile],
    *,
    whole_files: bool = True,
    max_tokens: int | None = None,
    say: Say = unsaid,
) -> tuple[Corpus, ...]:
    """Read files of text; those of one name are one corpus, the first of a name says where it stands.

    Files of `JSON_LINES` hold objects with `text` or `messages`; `hf://…` is a data set of the hub. Any other is plain
    text in UTF-8.

    Args:
        whole_files: each file of plain text is one document; else each of its lines is.
        max_tokens: that are needed of each name; of a data set no more is read, and of a file no more than
            `bounded` leaves.
        say: hears whether each file or each line is a document.

    Raises:
        UsageError: a data set without a bound.
        PruneError: a data set, and `datasets` is not installed.
        DataError: no such file, an empty one, or one that is not as it should be (with the line).
    """
    found: dict[str, Corpus] = {}
    for name, file in zip(names_of(files), files, strict=True):
        before = found.get(name, Corpus(name, (), (), whole_files))
        documents: tuple[str | Chat, ...]
        if is_hub_data(file.path):
            documents = read_hub_data(file.path, max_tokens)
        elif is_json_lines(file.path):
            documents = read_json_lines(file.path)
        else:
            texts = read_plain([file.path], whole_files=whole_files).texts
            documents = texts if max_tokens is None else bounded(texts, max_tokens)
        found[name] = replace(
            before, files=(*before.files, file.path), documents=(*before.documents, *documents)
        )
    say_convention([file.path for file in files], say, whole_files=whole_files)
    return tuple(found.values())


def token_rows(tokenizer: Tokenizer, corpus: Corpus, vocabulary: int | None = None) -> Iterator[list[int]]:
    """The tokens of each document: those that the tokenizer makes of it, or its chat template of a chat.

    Args:
        vocabulary: rows of the model's table; None: any id will do.

    Raises:
        DataError: a chat, and the tokenizer has no chat template, or one that does not take it.
        CheckpointError: the tokenizer does not work, or gives ids that the table has no row for.
    """
    for start in range(0, len(corpus.documents), AT_ONCE):
        some = corpus.documents[start : start + AT_ONCE]
        texts = [document for document in some if isinstance(document, str)]
        # Longer than the model takes is no news here.
        rows = iter(tokenized(tokenizer, texts, verbose=False)["input_ids"] if texts else ())
        for number, document in enumerate(some, start=start + 1):
            if isinstance(document, str):
                row = list(next(rows))
            else:
                where = f"{', '.join(map(str, corpus.files))}: chat {number:,}"
                if not getattr(tokenizer, "chat_template", None):
                    raise DataError(
                        f"{where}: the model's tokenizer has no chat template",
                        'Give plain text, or JSON lines with "text" in place of "messages".',
                    )
                try:
                    made = tokenizer.apply_chat_template(list(document), return_dict=False)
                    row = [int(token) for token in made]
                except Exception as error:  # whatever a template of the model's own raises
                    raise DataError(
                        f"{where}: the tokenizer's chat template does not take it ({reason_of(error)})"
                    ) from error
            require_rows(tokenizer, [row], vocabulary)
            yield row


FIELDS = ("label", "text", "text_b")
_REMEDY = (
    "A line is label<TAB>text, label<TAB>text<TAB>second text, or JSON with the keys label, text, text_b."
)


@dataclass(frozen=True)
class LabelledText:
    """The examples of one file.

    Attributes:
        path: the file.
        labels: of each example, as written.
        texts: of each example.
        seconds: the second text of each example, or None where examples have one text.
        lines: the line of the file that each example is on, from 1.
    """

    path: Path
    labels: tuple[str, ...]
    texts: tuple[str, ...]
    seconds: tuple[str, ...] | None
    lines: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def files(self) -> tuple[Path, ...]:
        """The file alone; as in `PlainText`."""
        return (self.path,)

    @property
    def sha256(self) -> str:
        """A hash of the examples."""
        return lines_sha256([*self.labels, *self.texts, *(self.seconds or ())])

    def first(self, count: int | None) -> LabelledText:
        """The first `count` examples; all of them where it is None.

        Raises:
            DataError: there are fewer.
        """
        require_count(count, len(self), "examples", str(self.path))
        return self.cut(slice(count))

    def cut(self, rows: slice) -> LabelledText:
        """Some of the examples."""
        seconds = None if self.seconds is None else self.seconds[rows]
        return LabelledText(self.path, self.labels[rows], self.texts[rows], seconds, self.lines[rows])


def read_labelled(path: Path) -> LabelledText:
    """Read `label<TAB>text` or `label<TAB>text<TAB>second text` lines, or JSON lines (`label`, `text`, `text_b`).

    It is JSON lines where the first line that is not blank begins with `{`. Blank lines are skipped.

    Raises:
        DataError: no such file, an empty one or one that is not UTF-8; a line without a label or a text, or with a
            second text where others have none.
    """
    numbered = [(number, line) for number, line in enumerate(read_lines(path), start=1) if line.strip()]
    is_json = numbered[0][1].lstrip().startswith("{")
    rows = []
    for number, line in numbered:
        where = f"{path}, line {number:,}"
        if is_json:
            fields = parsed_line(where, line, _REMEDY)
            if not isinstance(fields, dict):
                raise DataError(f"{where}: not a JSON object", _REMEDY)
        else:
            parts = line.split("\t")
            if len(parts) not in (2, 3):
                raise DataError(f"{where}: {len(parts)} fields, where 2 or 3 are expected", _REMEDY)
            fields = dict(zip(FIELDS, parts, strict=False))
        row: list[Any] = [
            fields.get(name) for name in FIELDS if name != "text_b" or fields.get(name) is not None
        ]
        row[0] = str(row[0]) if type(row[0]) in (int, float) else row[0]
        for what, value in zip(("label", "text", "text"), row, strict=False):
            if not isinstance(value, str) or not value.strip():
                raise DataError(f"{where}: no {what}", _REMEDY)
        rows.append([value.strip() for value in row])
        if len(row) != len(rows[0]):
            raise DataError(
                f"{where}: {len(row)} fields, where line {numbered[0][0]:,} has {len(rows[0])}", _REMEDY
            )
    labels, texts, *seconds = zip(*rows, strict=True)
    lines = tuple(number for number, _ in numbered)
    return LabelledText(path, labels, texts, seconds[0] if seconds else None, lines)


def label_ids(text: LabelledText, names: Mapping[int, str]) -> list[int]:
    """The class of each example: by a model's name for it, whatever its case, or by number.

    Args:
        names: class -> name, config.json's `id2label`.

    Raises:
        DataError: a label that is neither a name nor a number of a class.
    """
    known = {str(name): int(number) for number, name in names.items()}
    known |= {name.lower(): number for name, number in known.items() if name.lower() not in known}
    known |= {str(number): int(number) for number in names if str(number) not in known}
    ids = []
    for label, line in zip(text.labels, text.lines, strict=True):
        number = known.get(label, known.get(label.lower()))
        if number is None:
            raise DataError(
                f"{text.path}, line {line:,}: the model knows no label {label!r}",
                f"{near_names(label, map(str, names.values()), 'It knows')} Or give numbers, 0 to {len(names) - 1}.",
            )
        ids.append(number)
    return ids
