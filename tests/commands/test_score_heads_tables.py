"""The table of heads in the terminal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prunecli.architectures import FAMILIES
from prunecli.commands import console
from prunecli.commands.score_heads import head_table
from prunecli.model.attention import AttentionKind, AttentionLayer


def layer(kind: AttentionKind, number: int, heads: tuple[int, ...], original: int = 3) -> AttentionLayer:
    stack = FAMILIES["bart"].stacks[kind != "encoder"]
    name = f"{kind}.{number}"
    return AttentionLayer(
        name, kind, number, heads, original, original, {}, f"{name}.out", stack, stack.attentions[0], name
    )


Lines = Callable[[], list[list[str]]]

LAYERS = (
    layer("encoder", 0, (0, 1, 2)),
    layer("encoder", 1, ()),
    layer("encoder", 2, (2, 0)),
    layer("cross", 0, (1,)),
)
VALUES = {"encoder.0": [1.0, 2.0, 3.0], "encoder.1": [], "encoder.2": [5.0, 4.0], "cross.0": [-1.0]}


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    """The words of each line that was printed."""
    return lambda: [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_pruned_heads_have_no_value(lines: Lines) -> None:
    head_table(VALUES, LAYERS, "Importance")
    title, columns, _, *rows = lines()
    assert title == ["Importance"]
    assert columns == ["attention", "layer", "head", "0", "1", "2"]
    assert rows == [
        ["encoder", "0", "1", "2", "3"],
        ["encoder", "1", "-", "-", "-"],
        ["encoder", "2", "4", "-", "5"],
        ["cross", "0", "-", "-1", "-"],
    ]


@pytest.mark.parametrize("heads", [4, 6, 7, 16, 40])
def test_no_value_is_broken_in_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, lines: Lines, heads: int
) -> None:
    """Heads that do not fit beside the others are below them, the layer before them again."""
    monkeypatch.setattr(console, "width", lambda: 80)
    wide = layer("decoder", 3, tuple(range(heads)), original=heads)
    head_table({wide.name: [0.001234 + n / 1e6 for n in range(heads)]}, [wide])
    shown = [line[2:] for line in lines() if line[:2] == ["decoder", "3"]]
    assert [text for line in shown for text in line] == [f"{0.001234 + n / 1e6:.3g}" for n in range(heads)]
    assert (len(shown) > 1) == (heads > 6)


def test_layers_without_values_are_left_out(lines: Lines) -> None:
    head_table({"cross.0": [1.0]}, LAYERS)
    assert len(lines()) == 4


def test_values_that_do_not_fit_the_heads_are_a_fault() -> None:
    with pytest.raises(ValueError):
        head_table({"encoder.0": [1.0]}, LAYERS)
