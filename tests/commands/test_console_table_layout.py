"""Tables on narrow terminals: values whole, no line too long."""

from __future__ import annotations

import pytest

from prunecli.commands import console

WIDE = [
    {
        "checkpoint": "factorised-embeddings-of-a-model",
        "batch": "1",
        "beam": "5",
        "tokens/s": "124.2 ± 17.7",
        "s/sentence": "0.262 ± 0.037",
        "speed-up of the runs": "1.00x",
    },
    {"checkpoint": "demo", "batch": "8", "beam": "5"},
]


def printed(
    rows: list[dict[str, str]],
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    **more: int,
) -> list[str]:
    """Lines of a table at a width; none is longer."""
    monkeypatch.setenv("COLUMNS", str(width))
    console.table("Speed", rows, **more)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize("width", [48, 72, 100])
@pytest.mark.parametrize("keys", [1, 3])
def test_every_value_is_there_once_and_whole(width, keys, monkeypatch, capsys):
    shown = "\n".join(printed(WIDE, width, monkeypatch, capsys, keys=keys)) + "\n"
    for name, value in WIDE[0].items():
        count = shown.count(f" {value}\n") + shown.count(f" {value} ")
        assert count >= 1 or name == "checkpoint"
        assert count == 1 or name in ("checkpoint", "batch", "beam")
    tables = shown.count("demo")
    assert shown.count("beam") == (tables if keys == 3 else 1)
    assert shown.count("Speed") == 1


def test_long_names_are_folded(monkeypatch, capsys):
    lines = printed(WIDE, 48, monkeypatch, capsys)
    end = lines[2].index("batch")
    assert "".join(line[:end].strip() for line in lines[4:6]) == "factorised-embeddings-of-a-model"


def test_what_fits_is_one_table_with_whole_headings(monkeypatch, capsys):
    lines = printed(WIDE, 160, monkeypatch, capsys)
    (heading,) = [line for line in lines if "checkpoint" in line]
    assert heading.split() == " ".join(WIDE[0]).split()
    (last,) = [line for line in lines if "demo" in line]
    assert last.split() == ["demo", "8", "5", "-", "-", "-"]


def test_no_rows_and_a_value_wider_than_the_terminal(monkeypatch, capsys):
    console.table("nothing", [])
    assert not capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    console.table("", [{"name": "n", "one": "x" * 90, "two": "y" * 90}])
    shown = capsys.readouterr().out
    assert (shown.count("x"), shown.count("y")) == (90, 90)
