"""Questions after a component of a model, in words: `expert 7 of encoder layer 3`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from prunecli.errors import UsageError
from prunecli.model.axes import Kind

PARTS: tuple[Kind, ...] = get_args(Kind)
FORMS = (
    "expert 7 of layer 3; head 2 of decoder cross-attention layer 1; unit 5 of layer 0; layer 4; token ▁house"
)
_WORDS = {"of", "the", "ffn", "attention", "in", "its"}


@dataclass(frozen=True)
class Question:
    """Which component.

    Attributes:
        part: expert, head, unit, layer or token.
        number: its id in the original model; of a layer its number; None: of a token, which `text` names.
        text: of a token.
        side: of its stack; None: all that there are.
        kind: `cross`, `self`, or None: all.
        layer: number that its layer had in the original model; None: all.
    """

    part: Kind
    number: int | None = None
    text: str = ""
    side: str | None = None
    kind: str | None = None
    layer: int | None = None


def parse_question(words: Sequence[str]) -> Question:
    """`expert 7 of encoder layer 3`, in words or as one text.

    Raises:
        UsageError: it is not of this form.
    """
    text = " ".join(words).strip()
    first, _, rest = text.partition(" ")
    if first.lower() == "token" and rest:
        return Question("token", text=rest)
    if first.lower().removesuffix("s") not in (*PARTS, "encoder", "decoder"):
        raise UsageError(f"{text!r}: no part of a model.", f"Ask for {FORMS}.")
    found: dict[str, Any] = {}
    left = re.sub(r"[,:]|(?<=cross)-(?=attention)|(?<=self)-(?=attention)", " ", text.lower()).split()
    while left:
        word = left.pop(0).removesuffix("s") if left[0].removesuffix("s") in PARTS else left.pop(0)
        if word in PARTS:
            if not left or not left[0].isdecimal():
                raise UsageError(f"{text!r}: which {word}?", f"Ask for {FORMS}.")
            found[word] = int(left.pop(0)[:15])
        elif word in ("encoder", "decoder"):
            found["side"] = word
        elif word in ("cross", "self"):
            found["kind"] = word
        elif word not in _WORDS:
            raise UsageError(f"{text!r}: what is {word!r}?", f"Ask for {FORMS}.")
    asked: list[Kind] = [known for known in PARTS if known in found and known != "layer"]
    if len(asked) > 1 or not found.keys() & {*PARTS}:
        raise UsageError(f"{text!r}: of one part at a time.", f"Ask for {FORMS}.")
    part, layer = (asked[0], found.get("layer")) if asked else ("layer", None)
    return Question(part, found[part], "", found.get("side"), found.get("kind"), layer)
