"""Questions in words."""

from __future__ import annotations

import pytest

from prunecli.analysis.explanation import Question, parse_question
from prunecli.errors import UsageError


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("expert 7 of layer 3", Question("expert", 7, layer=3)),
        ("Expert 7 of the encoder layer 3", Question("expert", 7, side="encoder", layer=3)),
        ("expert 7", Question("expert", 7)),
        ("head 2 of decoder cross-attention layer 1", Question("head", 2, "", "decoder", "cross", 1)),
        ("head 2 of layer 1, self-attention", Question("head", 2, "", None, "self", 1)),
        ("unit 5 of layer 0 of the encoder", Question("unit", 5, side="encoder", layer=0)),
        ("layer 4", Question("layer", 4)),
        ("decoder layer 4", Question("layer", 4, side="decoder")),
        ("token ▁house", Question("token", text="▁house")),
        ("token of", Question("token", text="of")),
        ('token "a b"', Question("token", text='"a b"')),
    ],
)
def test_questions_are_read(text: str, question: Question) -> None:
    assert parse_question([text]) == parse_question(text.split()) == question


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no part"),
        ("neuron 3", "no part"),
        ("expert", "which expert"),
        ("expert seven", "which expert"),
        ("expert 7 of house 3", "what is 'house'"),
        ("head 2 of expert 3", "one part at a time"),
        ("encoder", "one part at a time"),
        ("token", "which token"),
        ("expert -1", "which expert"),
    ],
)
def test_what_is_no_question_is_refused_with_examples(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_question(text.split())
    assert "expert 7 of layer 3" in str(caught.value.remedy)
