"""What `prunecli explain DIR WHAT --json` prints."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from prunecli.results.document import Count, Document, Record
from prunecli.results.tabled import Tables


class Told(Record):
    """What one step says of the component, or where it is now.

    Attributes:
        step: of the history, from 0; left out of where it is now.
        fields: what there is of `part`, `place`, `side`, `layer`, `id`, `kept`, `metric`, `value`, `rank`, `of`,
            `cutoff`, `margin`; numbers as the step counts.
    """

    text: str
    step: Count | None = None
    command: str = ""
    fields: dict[str, Any] = Field(default_factory=dict)


class Explanation(Document):
    """Answers to one question, in the order of the history."""

    FORMAT: ClassVar[str] = "prunecli.explanation/1"

    question: str
    answers: list[Told]

    def _tables(self) -> Tables:
        """`answers`: a step."""
        return {
            "answers": [
                {"step": one.step, "command": one.command, **one.fields, "text": one.text}
                for one in self.answers
            ]
        }
