"""What the terminal shows: tables, their titles, names as they are, progress."""

from __future__ import annotations

import io
import sys

import pytest

from prunecli.commands import console


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_title_is_not_wrapped_at_the_width_of_its_table(capsys):
    title = "Experts that each layer keeps under a threshold"
    console.table(title, ["layer", "n"], [["0", "12"]])
    assert capsys.readouterr().out.split("\n")[0] == title


def test_a_title_is_wrapped_at_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    console.table("word " * 12, ["layer", "n"], [["0", "12"]])
    lines = terminal.getvalue().splitlines()
    assert [line.count("word") for line in lines[:2]] == [8, 4]


def test_columns_that_are_asked_for_hold_in_a_pipe(monkeypatch, capsys):
    line = "  a note of words that does not fit, not/even/this/path/of/one/word"
    console.note(line)
    monkeypatch.setenv("COLUMNS", "30")
    console.note(line)
    console.verbatim(line)
    console.table("", ["checkpoint"], [["x" * 40]])
    out, err = capsys.readouterr()
    wrapped = ["  a note of words that does", "  not fit,", "  not/even/this/path/of/one/word"]
    assert err.splitlines() == [line, *wrapped]
    assert out.splitlines()[0] == line
    assert max(map(len, out.splitlines()[1:])) <= 30


def test_lines_outside_of_a_terminal_end_where_their_text_does(capsys):
    console.table("Heads", ["attention", "kept"], [["encoder", "1"]])
    lines = capsys.readouterr().out.split("\n")
    assert "encoder" in " ".join(lines)
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("name", ["a[red]b", "a[/b]", ":smile:"])
def test_names_are_shown_as_they_are(capsys, name):
    console.table(f"of {name}", ["checkpoint", name], [[name, "1"]])
    assert capsys.readouterr().out.count(name) == 3


def test_a_description_of_progress_is_shown_as_it_is(monkeypatch):
    stream = _Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with console.progress()("a[/b]: translating", 10, "sentences") as advance:
        advance(10)
    assert "a[/b]: translating" in stream.getvalue()


def test_a_plain_line_says_the_time_left_only_where_some_is(monkeypatch, capsys):
    clock = iter([0.0, 20.0, 40.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress()("timing", 4, "runs") as advance:
        advance(2)
        advance(2)
    assert capsys.readouterr().err.splitlines() == [
        "timing: 2 of 4 runs, 0.1 a second, 20 s left",
        "timing: 4 of 4 runs, 0.1 a second",
    ]


def test_headings_are_wrapped_before_values_are(monkeypatch, capsys):
    columns = ["pair", "encoder tokens", "busy experts, encoder", "decoder"]
    rows = [["qba_Latn-qka_Latn", "2,826", "3.5", "4.0"]]
    monkeypatch.setattr(console, "width", lambda: 50)
    console.table("Statistics", columns, rows)
    first, second, third, _, values = capsys.readouterr().out.splitlines()[2:7]
    assert (first.split(), second.split()) == (["busy"], ["encoder", "experts,"])
    assert third.split() == ["pair", "tokens", "encoder", "decoder"]
    assert values.split() == rows[0]
    assert len(values) <= 50


@pytest.mark.parametrize(("term", "kind"), [("xterm", "_bars"), ("dumb", "_lines")])
def test_bars_are_for_terminals_that_can_draw_them(monkeypatch, term, kind):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stderr", _Terminal())
    assert console.progress() is getattr(console, kind)


@pytest.mark.parametrize("unit", ["sentences", "bytes"])
def test_a_bar_shows_the_rate(monkeypatch, unit):
    stream = _Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with console.progress()("reading", 8 * 2**20, unit) as advance:
        advance(4 * 2**20)
        advance(4 * 2**20)
    assert "/s" in stream.getvalue()
    assert unit != "bytes" or "8.0/8.0 MiB" in stream.getvalue()
