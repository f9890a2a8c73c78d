"""OUTPUT.finetune.json: a training's log and figures."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from prunecli.results.document import Count, Document, Number, Record


class LoggedStep(Record):
    """A line of a training's log."""

    step: Count
    loss: Number
    chrf: Number | None = Field(default=None, alias="chrf++")
    cosine: Number | None = None


class Training(Document):
    """OUTPUT.finetune.json.

    Attributes:
        left_out: files of the source that the result lacks.
        stock: whether plain transformers opens the result, and why not.
        warmup: updates in which the learning rate rose.
        best: the step that is the result, where a validation chose it.
    """

    FORMAT: ClassVar[str] = "prunecli.finetune/1"

    left_out: list[str] = Field(default_factory=list)
    output: str
    stock: dict[str, Any] = Field(default_factory=dict)
    arguments: dict[str, Any] = Field(default_factory=dict)
    steps: Count
    warmup: Count | None = None
    epochs: Number | None = None
    metric: str | None = None
    best: dict[str, Any] | None = None
    tokens: Count = 0
    seconds: Number = 0.0
    tokens_per_second: Number = 0.0
    parameters: Count | None = None
    training: list[LoggedStep] = Field(default_factory=list)
    validation: list[LoggedStep] = Field(default_factory=list)
