import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import closing
from pathlib import Path

import pyte
import pytest

from prunecli.commands import console
from prunecli.demo import CHECKPOINT


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, name: str, columns: int) -> _Terminal:
    """A terminal in the place of stdout or stderr."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = _Terminal()
    monkeypatch.setattr(sys, name, stream)
    return stream


def table(*arguments, **options):
    console.show([console.table(*arguments, **options)])


def test_a_title_is_not_wrapped_at_the_width_of_its_table(capsys):
    title = "Experts that each layer keeps under a threshold"
    table(title, [{"layer": "0", "n": "12"}])
    assert capsys.readouterr().out.split("\n")[0] == title


def test_a_title_is_wrapped_at_the_width_of_the_terminal(monkeypatch):
    shown = terminal(monkeypatch, "stdout", 40)
    table("word " * 12, [{"layer": "0", "n": "12"}])
    lines = shown.getvalue().splitlines()
    assert [line.count("word") for line in lines[:2]] == [8, 4]


def test_columns_that_are_asked_for_hold_in_a_pipe(monkeypatch, capsys):
    line = "  a note of words that does not fit, not/even/this/path/of/one/word"
    console.note(line)
    monkeypatch.setenv("COLUMNS", "30")
    console.note(line)
    console.verbatim(line)
    table("", [{"checkpoint": "x" * 40}])
    out, err = capsys.readouterr()
    wrapped = ["  a note of words that does", "  not fit,", "  not/even/this/path/of/one/word"]
    assert err.splitlines() == [line, *wrapped]
    assert out.splitlines()[0] == line
    assert max(map(len, out.splitlines()[1:])) <= 30


@pytest.mark.parametrize("name", ["a[red]b", "a[/b]", ":smile:"])
def test_names_are_shown_as_they_are(capsys, name):
    table(f"of {name}", [{"checkpoint": name, name: "1"}])
    assert capsys.readouterr().out.count(name) == 3


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


@pytest.mark.parametrize("unit", ["sentences", "bytes"])
def test_a_bar_shows_its_description_as_it_is_and_the_rate(monkeypatch, unit):
    shown = terminal(monkeypatch, "stderr", 80)
    with console.progress()("a[/b]: reading", 8 * 2**20, unit) as advance:
        advance(4 * 2**20)
        advance(4 * 2**20)
    assert "a[/b]: reading" in shown.getvalue()
    assert "/s" in shown.getvalue()
    assert unit != "bytes" or "8.0/8.0 MiB" in shown.getvalue()


CODE = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from prunecli.__main__ import main; {}main()"
"""Ctrl-C reaches those processes alone whose session the terminal controls."""
COUNTING = """
import time
from prunecli.commands import console
from prunecli.model import inventory

def count(_):
    console.note("Experts are counted one by one, which takes as long as a cup of tea.")
    with console.progress()("counting experts", 6000, "experts") as advance:
        while True:
            advance(1)
            time.sleep(0.02)

inventory.take_inventory = count
"""
"""A command that takes long."""


class Terminal:
    """A running command and its screen."""

    def __init__(self, columns: int, line: str, code: str = "", **environment: str) -> None:
        self.screen = pyte.Screen(columns, 100)
        self.stream = pyte.ByteStream(self.screen)
        self.written = b""
        self.descriptor, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 100, columns, 0, 0))
        Path("demo").symlink_to(CHECKPOINT)
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
        own = {"TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUTF8": "1"}
        command = [sys.executable, "-c", CODE.format(code), *line.split()]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), inner)
        environment = {**kept, **own, **environment}
        self.process = subprocess.Popen(command, **streams, env=environment, start_new_session=True)
        os.close(inner)

    def read(self, pattern: str = "(?!)") -> None:
        """Draw what the command writes, to its end or until the screen holds the pattern."""
        while not re.search(pattern, self.text):
            try:
                some = os.read(self.descriptor, 65536)
            except OSError:  # the other side is closed
                break
            self.written += some
            self.stream.feed(some)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.descriptor)


NOTE = """\
Experts drawn at random (seed 0), balance 1:1 (default). Warning: 81% of the experts are \
removed. Measure the result with prunecli evaluate; if its scores fell too far, remove less or run prunecli finetune."""
TABLE = """\
Experts

 layer                            before   kept   removed
 ────────────────────────────────────────────────────────
 model.encoder.layers.1.ffn           64     12     81.2%
 model.encoder.layers.3.ffn           64     12     81.2%
 model.decoder.layers.1.ffn           64     12     81.2%
 model.decoder.layers.3.ffn           64     12     81.2%
 all model.encoder.layers.*.ffn      128     24     81.2%
 all model.decoder.layers.*.ffn      128     24     81.2%
 all experts                         256     48     81.2%
"""
SIZES = """
parameters 2,433,728 -> 689,856 (28.3%), bytes 4.64 MiB -> 1.32 MiB (28.3%)
Not a stock model: the stock routing of NLLB-MoE is wrong in transformers 5.
Dry run: nothing is written."""
WRAPPED_SIZES = """
parameters 2,433,728 -> 689,856 (28.3%), bytes 4.64 MiB ->
1.32 MiB (28.3%)
Not a stock model: the stock routing of NLLB-MoE is wrong in
transformers 5.
Dry run: nothing is written."""


@pytest.mark.parametrize(
    ("columns", "environment", "end", "bold"), [(80, {}, SIZES, 2), (60, {"TERM": "dumb"}, WRAPPED_SIZES, 0)]
)
def test_a_table(columns, environment, end, bold):
    command = "prune-experts demo --metric random --ratio 0.8 --dry-run"
    with closing(Terminal(columns, command, **environment)) as shown:
        shown.read()
        notes, _, rest = shown.text.partition("Experts\n")
    assert f"Experts\n{rest}" == TABLE + end
    assert " ".join(notes.split()) == NOTE
    cells = [[*row.values()] for row in shown.screen.buffer.values()]
    assert {cell.fg for row in cells for cell in row} == {"default"}
    assert sum(any(cell.bold for cell in row) for row in cells) == bold, "the title and the headings"
    assert bold or b"\x1b" not in shown.written


PANEL = """\
Usage: prunecli inspect [OPTIONS] [CHECKPOINT]
Try 'prunecli inspect --help' for help.
╭─ Error ──────────────────────────────────────────────────╮
│ No such option: --model. Did you mean the argument       │
│ CHECKPOINT (prunecli inspect CHECKPOINT)?                │
╰──────────────────────────────────────────────────────────╯"""


def test_an_error():
    with closing(Terminal(60, "inspect --model demo")) as shown:
        shown.read()
        assert shown.text == PANEL


NOTES = """\
Experts are counted one by one, which takes as long as a cup
of tea.
"""


def test_a_bar_that_ctrl_c_ends():
    with closing(Terminal(60, "inspect demo", COUNTING)) as shown:
        shown.read(r"\d/s \d:\d\d:\d\d$")
        notes, bar = shown.text[: len(NOTES)], shown.text[len(NOTES) :]
        assert notes == NOTES
        assert re.fullmatch(r"counting experts [━╸╺ ]+ \d+/6000 experts [\d,.]+/s \d:\d\d:\d\d", bar), bar
        os.write(shown.descriptor, b"\x03")
        shown.read()
        assert shown.text == f"{NOTES}Interrupted: no output is half-written."
        assert not shown.screen.cursor.hidden
        assert shown.process.wait() == 130


# Tables on narrow terminals: values whole, no line too long.


SPEEDS = {"tokens/s": "124.2 ± 17.7", "s/sentence": "0.262 ± 0.037", "speed-up of the runs": "1.00x"}
WIDE = [
    {"checkpoint": "factorised-embeddings-of-a-model", "batch": "1", "beam": "5", **SPEEDS},
    {"checkpoint": "demo", "batch": "8", "beam": "5"},
]


@pytest.fixture
def printed(monkeypatch, capsys):
    """(rows, width) -> lines of a table; none is longer."""

    def show(rows, width, **more):
        monkeypatch.setenv("COLUMNS", str(width))
        table("Speed", rows, **more)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        return lines

    return show


@pytest.mark.parametrize("width", [48, 72, 100])
@pytest.mark.parametrize("keys", [1, 3])
def test_every_value_is_there_once_and_whole(width, keys, printed):
    shown = "\n".join(printed(WIDE, width, keys=keys)) + "\n"
    for name, value in WIDE[0].items():
        count = shown.count(f" {value}\n") + shown.count(f" {value} ")
        assert count >= 1 or name == "checkpoint"
        assert count == 1 or name in ("checkpoint", "batch", "beam")
    tables = shown.count("demo")
    assert shown.count("beam") == (tables if keys == 3 else 1)
    assert shown.count("Speed") == 1


def test_long_names_are_folded(printed):
    lines = printed(WIDE, 48)
    end = lines[2].index("batch")
    assert "".join(line[:end].strip() for line in lines[4:6]) == "factorised-embeddings-of-a-model"


def test_what_fits_is_one_table_with_whole_headings(printed):
    lines = printed(WIDE, 160)
    (heading,) = [line for line in lines if "checkpoint" in line]
    assert heading.split() == " ".join(WIDE[0]).split()
    (last,) = [line for line in lines if "demo" in line]
    assert last.split() == ["demo", "8", "5", "-", "-", "-"]


def test_no_rows_and_a_value_wider_than_the_terminal(monkeypatch, capsys):
    table("nothing", [])
    assert not capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    table("", [{"name": "n", "one": "x" * 90, "two": "y" * 90}])
    shown = capsys.readouterr().out
    assert (shown.count("x"), shown.count("y")) == (90, 90)
