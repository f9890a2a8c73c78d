"""Tables on narrow terminals: values whole, names told apart, no line too long."""

from __future__ import annotations

import pytest

from prunecli.commands import console
from prunecli.commands.console import blocks, shortened

HEADS = [
    f"model.{side}.layers.{layer}.{kind}"
    for side in ("encoder", "decoder")
    for layer in range(12)
    for kind in ("self_attn", "cross_attention")
]


@pytest.mark.parametrize("longest", [28, 33, 37])
def test_shortened_names_are_told_apart(longest: int) -> None:
    found = shortened(HEADS, longest)
    assert len(set(found)) == len(HEADS)
    assert max(map(len, found)) == longest
    for name, short in zip(HEADS, found, strict=True):
        head, _, tail = short.partition("…")
        assert name == short or (name.startswith(head) and name.endswith(tail) and tail)


def test_names_that_fit_stay() -> None:
    assert shortened(["a name of words", "b"], 5) == ["a name of words", "b"]
    assert shortened([], 5) == []


WIDE = (
    ["checkpoint", "batch", "beam", "tokens/s", "s/sentence", "speed-up of the runs"],
    [
        ["factorised-embeddings-of-a-model", "1", "5", "124.2 ± 17.7", "0.262 ± 0.037", "1.00x"],
        ["demo", "8", "5"],
    ],
)


@pytest.mark.parametrize("width", [48, 72, 100])
@pytest.mark.parametrize("keys", [1, 3])
def test_every_value_is_there_once_and_whole(
    width: int, keys: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns, rows = WIDE
    made = blocks(columns, rows, width, keys=keys)
    held = [" ".join(name.split()) for block in made for name in block.columns[keys:]]
    assert held == columns[keys:]
    for block in made:
        assert [" ".join(name.split()) for name in block.columns[:keys]] == columns[:keys]
        assert [row[1:keys] for row in block.rows] == [tuple(row[1:keys]) for row in rows]
    monkeypatch.setattr(console, "width", lambda: width)
    console.table("Speed", *WIDE, keys=keys)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    for value in rows[0][1:]:
        assert shown.count(f" {value}\n") + shown.count(f" {value} ") >= 1
    assert shown.count("Speed") == 1


def test_what_fits_is_one_table_with_whole_headings() -> None:
    columns, rows = WIDE
    (block,) = blocks(columns, rows, 160)
    assert list(block.columns) == columns
    assert [list(row) for row in block.rows] == [rows[0], ["demo", "8", "5", "", "", ""]]


def test_no_rows_and_a_value_wider_than_the_terminal() -> None:
    assert blocks(["a", "b"], [], 10)[0].rows == ()
    made = blocks(["name", "one", "two"], [["n", "x" * 90, "y" * 90]], 60)
    assert [block.rows[0][1][:1] for block in made] == ["x", "y"]
