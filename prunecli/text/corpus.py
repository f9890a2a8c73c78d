"""Named texts for language models: plain text, or JSON lines of texts or of chats."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prunecli.errors import DataError, UsageError, reason_of
from prunecli.progress import Say, unsaid
from prunecli.text.hub_data import is_hub_data, read_hub_data
from prunecli.text.json_lines import Chat, is_json_lines, read_json_lines
from prunecli.text.named import TextFile, names_of
from prunecli.text.plain import bounded, convention, read_plain
from prunecli.text.tokens import Tokenizer, require_rows, tokenized

AT_ONCE = 1 << 8
"""Texts that are tokenised at a time."""


@dataclass(frozen=True)
class Corpus:
    """What one name stands for.

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

    A file called `.jsonl` holds an object a line: `text`, or `messages`; `hf://…` is a data set of the hub. Any other
    is plain text in UTF-8.

    Args:
        whole_files: each file of plain text is one document; else each of its lines is.
        max_tokens: that are needed of each name; of a data set no more is read, and of a file no more than
            `bounded` leaves.
        say: hears whether each file or each line is a document.

    Raises:
        UsageError: no file is given, or a data set without a bound.
        PruneError: a data set, and `datasets` is not installed.
        DataError: no such file, an empty one, or one that is not as it should be (with the line).
    """
    if not files:
        raise UsageError("no text was given", "Name one or more with --text NAME=FILE.")
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
    if (line := convention([file.path for file in files], whole_files=whole_files)) is not None:
        say(line)
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
            if vocabulary is not None:
                require_rows(tokenizer, [row], vocabulary)
            yield row
