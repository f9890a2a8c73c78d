"""What a tokenizer's chat template writes: its own text, and what stands right before and after a message."""

from __future__ import annotations

import re
from itertools import pairwise, product
from typing import Any

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
