"""The table of heads in the terminal."""

from __future__ import annotations

from io import StringIO

import pytest

from prunecli.commands.head_table import head_table
from tests.analysis.test_head_plots import LAYERS, VALUES, layer


def lines(table: object) -> list[list[str]]:
    from rich.console import Console

    console = Console(file=StringIO(), width=200)
    console.print(table)
    return [line.split() for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]


def test_pruned_heads_have_no_value() -> None:
    title, columns, _, *rows = lines(head_table(VALUES, LAYERS, "Importance"))
    assert title == ["Importance"]
    assert columns == ["attention", "layer", "head", "0", "1", "2"]
    assert rows == [
        ["encoder", "0", "1", "2", "3"],
        ["encoder", "1", "-", "-", "-"],
        ["encoder", "2", "4", "-", "5"],
        ["cross", "0", "-", "-1", "-"],
    ]


def test_layers_of_many_heads_take_several_lines() -> None:
    wide = layer("decoder", 3, tuple(range(18)), original=18)
    _, _, _, first, second = lines(head_table({wide.name: [n / 7 for n in range(18)]}, [wide]))
    assert first[:5] == ["decoder", "3", "0", "0.143", "0.286"]
    assert second == ["from", "head", "16", "2.29", "2.43"]


def test_layers_without_values_are_left_out() -> None:
    assert len(lines(head_table({"cross.0": [1.0]}, LAYERS))) == 4


def test_values_that_do_not_fit_the_heads_are_a_fault() -> None:
    with pytest.raises(ValueError):
        head_table({"encoder.0": [1.0]}, LAYERS)
