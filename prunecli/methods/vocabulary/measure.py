"""Which tokens text falls into, and how often."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from prunecli.methods.vocabulary.tokenizer import is_fast
from prunecli.progress import Progress, silent
from prunecli.text.choice import Lines
from prunecli.text.tokens import tokenized

MESSAGE = "\ue000"
"""Stands for the content of every message: a character that no template writes."""

_CHATS: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "call", "tool"),
)
"""Roles of the messages; "call": an assistant that calls a tool. A template may refuse some of these."""
_CALL = {"type": "function", "id": "0", "function": {"name": "a", "arguments": {"b": "c"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "a",
        "description": "d",
        "parameters": {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
    },
}

BATCH = 4_000_000
"""Characters that are tokenised at once, if the longest text has no more."""
PIECE = 1_000_000
"""Characters after which a long document is cut, to bound the memory of its tokens."""
OVERLAP = 16
"""Lines that two neighbouring pieces of a document share: no token spans more line ends."""
REACH = 64
"""Characters of a message that the tokens at its ends may depend on."""


@dataclass(frozen=True)
class Text:
    """The text that the vocabulary has to serve.

    Attributes:
        lines: each once, none blank.
        repeats: how often each occurs.
        splits: those of a directory that they are from.
        languages: of these splits.
        files: names of the others.
        documents: the files of more than one line, in pieces.
        messages: the beginnings and ends of lines and documents, inside of what the chat template writes around them.
        template: what the chat template writes.
    """

    lines: tuple[str, ...]
    repeats: tuple[int, ...]
    splits: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    template: tuple[str, ...] = ()

    @classmethod
    def of(cls, lines: Lines, tokenizer: Any) -> Text:
        """`lines`, their documents, and both as messages to a chat model.

        Tokens depend on what stands around a line: line ends and blank lines in a document, roles in a chat.
        """
        counted = Counter(lines.texts)
        files, texts = ((), ()) if lines.plain is None else (lines.plain.files, lines.plain.texts)
        documents = [text for text in texts if "\n" in text]
        template, frames = chat_texts(tokenizer)
        messages = {*counted, *documents, *(line for document in documents for line in document.split("\n"))}
        ends = {end for text in messages for end in (_ends(text), _ends(text.strip()))}
        return cls(
            tuple(counted),
            tuple(counted.values()),
            lines.splits,
            lines.languages,
            tuple(path.name for path in files),
            tuple(piece for document in documents for piece in _pieces(document)),
            tuple(sorted(f"{before}{text}{after}" for before, after in frames for text in ends)),
            template,
        )

    @property
    def all(self) -> tuple[str, ...]:
        """Every text that has to fall into the same tokens as before."""
        return (*self.lines, *self.documents, *self.messages, *self.template)

    @property
    def sentences(self) -> int:
        """All lines, repeated ones too."""
        return sum(self.repeats)

    @property
    def sha256(self) -> str:
        """A hash of the lines."""
        digest = hashlib.sha256()
        for line, count in zip(self.lines, self.repeats, strict=True):
            digest.update(f"{count} {line}\n".encode())
        return digest.hexdigest()


def _pieces(document: str) -> Iterator[str]:
    """`document` with a last line end, cut at line ends where it is long; neighbours share `OVERLAP` lines."""
    lines = f"{document}\n".splitlines(keepends=True)
    first = 0
    while first < len(lines):
        last, length = first, 0
        while last < len(lines) and (length < PIECE or last <= first + OVERLAP):
            length += len(lines[last])
            last += 1
        yield "".join(lines[first:last])
        first = last if last == len(lines) else last - OVERLAP


def _ends(text: str) -> str:
    """`text` without the words in its middle."""
    first, last = text.find(" ", REACH), text.rfind(" ", 0, max(len(text) - REACH, 0))
    return text[:first] + text[last:] if -1 < first < last else text


@dataclass(frozen=True)
class TokenCounts:
    """How often each token occurs in a text.

    Attributes:
        counts: token -> occurrences; special tokens around the sentences are left out.
        template: tokens that the chat template writes.
    """

    counts: Mapping[str, int]
    template: Set[str] = frozenset()


def count_tokens(tokenizer: Any, text: Text, progress: Progress = silent) -> TokenCounts:
    """Tokenise `text`, as source and, if target text has a model of its own (Marian), as target.

    A token counts as often as it occurs in the lines, in the documents or in the messages, where it occurs most.
    """
    with progress("counting tokens", len(text.all), "texts") as advance:
        lines = _counted(tokenizer, dict(zip(text.lines, text.repeats, strict=True)), advance)
        documents, messages, template = (
            _counted(tokenizer, Counter(texts), advance)
            for texts in (text.documents, text.messages, text.template)
        )
    for token in template:
        del messages[token]
    return TokenCounts(lines | documents | messages, template.keys())


def _counted(tokenizer: Any, view: Mapping[str, int], advance: Callable[[int], None]) -> Counter[str]:
    counts: Counter[Any] = Counter()
    for part in batches(tuple(view)):
        for is_target in sides(tokenizer):
            for text, tokens in zip(part, _tokens(tokenizer, part, is_target), strict=True):
                for token in tokens:
                    counts[token] += view[text]
        advance(len(part))
    if is_fast(tokenizer):
        return Counter({str(tokenizer.convert_ids_to_tokens(key)): n for key, n in counts.items()})
    return counts


def sides(tokenizer: Any) -> tuple[bool, ...]:
    """The values of `is_target` to tokenise text with: both, if source and target have models of their own (Marian)."""
    return (False, True) if hasattr(tokenizer, "spm_target") else (False,)


@contextmanager
def as_side(tokenizer: Any, is_target: bool) -> Iterator[None]:
    """Text is source or target text inside of the block."""
    if is_target:
        tokenizer._switch_to_target_mode()
    try:
        yield
    finally:
        if is_target:
            tokenizer._switch_to_input_mode()


def batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, many short ones or few long ones at a time."""
    part: list[str] = []
    length = 0
    for text in texts:
        if part and length + len(text) > BATCH:
            yield part
            part, length = [], 0
        part.append(text)
        length += len(text)
    if part:
        yield part


def _tokens(tokenizer: Any, texts: list[str], is_target: bool) -> list[list[Any]]:
    """Tokens of each text: ids of a fast tokenizer; strings of a slow one (pieces outside of its vocabulary too)."""
    if is_fast(tokenizer):
        options = {"add_special_tokens": False, "truncation": False, "verbose": False}
        return list(tokenized(tokenizer, texts, **options)["input_ids"])
    with as_side(tokenizer, is_target):
        return [tokenizer.tokenize(text) for text in texts]


def chat_texts(tokenizer: Any) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The texts that the chat templates write, and the pairs of texts that stand right before and after a message.

    The text before a message begins with the last special token there, the text after it ends with the next one, since
    tokenizers cut text at special tokens first. Both are empty for a tokenizer without a chat template.
    """
    templates = getattr(tokenizer, "chat_template", None) or {}
    special = "|".join(sorted(map(re.escape, tokenizer.get_added_vocab()), key=len, reverse=True)) or "(?!)"
    texts: set[str] = set()
    frames: set[tuple[str, str]] = set()
    for template in (templates,) if isinstance(templates, str) else templates.values():
        texts.update(_literals(template))
        for roles, tools, prompt in product(_CHATS, (None, [_TOOL]), (False, True)):
            parts = _rendered(tokenizer, template, roles, tools, prompt).split(MESSAGE)
            texts.update(parts)
            for before, after in pairwise(parts):
                last = max((found.start() for found in re.finditer(special, before)), default=0)
                ends = re.search(special, after)
                frames.add((before[last:], after if ends is None else after[: ends.end()]))
    return tuple(sorted(texts - {""})), tuple(sorted(frames))


def _literals(template: str) -> set[str]:
    """Text of the template for settings that no chat above has, such as tools and reasoning."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        tokens = list(Environment(trim_blocks=True, lstrip_blocks=True).lexer.tokenize(template))
    except TemplateSyntaxError:  # no text could be made with such a template
        return set()
    return {str(token.value) for token in tokens if token.type in ("data", "string")}


def _rendered(tokenizer: Any, template: str, roles: tuple[str, ...], tools: Any, prompt: bool) -> str:
    chat = [
        {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        if role == "call"
        else {"role": role, "content": MESSAGE}
        for role in roles
    ]
    options = {"tools": tools, "add_generation_prompt": prompt, "tokenize": False}
    try:
        return str(tokenizer.apply_chat_template(chat, chat_template=template, **options))
    except Exception:  # a template refuses roles and tools by any error; its literals are kept all the same
        return ""
