import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from prunecli import __version__, processes
from prunecli.commands import app, console, failures
from prunecli.commands.command import command as command_of
from prunecli.commands.command import function_of as command
from prunecli.commands.command import options_of, parameters
from prunecli.errors import CheckpointError, OutputError, UsageError, damaged
from prunecli.options import ONLY_WITH, RENAMED, Options, option
from prunecli.results.inspection import Way
from prunecli.tensors.hub.names import expanded
from prunecli.tensors.transaction import refuse_target, refuse_unwritable
from tests.commands.calls import names
from tests.families import tiny_family
from tests.fuzz import rounds
from tests.fuzz.rounds import run
from tests.tiny import tiny_nllb_moe, write_files

COMMANDS = [name for names in app.COMMANDS.values() for name in names]


def test_help_lists_every_command_and_imports_no_heavy_library():
    code = (
        "import sys; from prunecli.commands.app import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: status = end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'scipy', 'altair', 'sacrebleu'} & set(sys.modules)\n"
        "sys.exit(status or (f'imported {heavy}' if heavy else 0))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert [name for name in COMMANDS if name not in result.stdout] == []


def test_results_hold_the_command_line_that_was_called(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prunecli", "--secret"])
    result = rounds.run("inspect --json")
    assert result.json["command"] == ["prunecli", "inspect", "--json"], result.err
    assert not processes.COMMAND.get()


@pytest.mark.parametrize("name", ["prune-experts", "evaluate", "finetune", "run"])
def test_help_shows_its_texts_as_they_are_written(name, monkeypatch):
    """Brackets and colons too, which rich may take for markup and emoji."""
    monkeypatch.setenv("COLUMNS", "2000")
    shown = rounds.run(f"help {name}").out
    assert rounds.run(f"{name} -h").out == shown
    function = command(name)
    described = [" ".join(text.split()) for text in (function.__doc__ or "").split("\n\n")]
    assert described[0] in (listed := rounds.run("help").out)
    shown = rounds.run(f"{name} --help-all").out
    options = options_of(function).list_options().values()
    for text in [*described, *(one.described for one in options), *(one.metavar for one in options)]:
        assert text in shown
    assert "<" not in shown + listed, "types that typer shows"


def test_an_interrupt_while_the_command_line_is_imported_is_said_in_a_line():
    code = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'prunecli.commands.app': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from prunecli.__main__ import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, f"{app.INTERRUPTED}\n")


def test_an_interrupt_while_options_are_read_is_said_in_a_line(monkeypatch):
    monkeypatch.setattr("prunecli.commands.command.no_such_directory", Mock(side_effect=KeyboardInterrupt))
    result = rounds.run("inspect nowhere")
    assert (result.status, result.err) == (130, f"{app.INTERRUPTED}\n")


@pytest.mark.parametrize(
    "line",
    [
        *("collect-gates nowhere -o there", "compare-heads nowhere there -o there"),
        *("evaluate . nowhere -o there", "finetune . --teacher nowhere -o there"),
        *("prune-heads nowhere --keep gone -o there", "evaluate --data nowhere -o there"),
        *("evaluate --task lm --text name=nowhere", "score-heads --labelled nowhere"),
    ],
)
def test_a_name_that_leads_nowhere_is_said_first(line):
    Path("there").write_text("{}")
    result = rounds.run(line)
    assert result.status == 1
    assert re.match("Error: nowhere: no such (directory|file)", result.err), result.err


def test_debug_shows_the_traceback_of_a_failure():
    plain = rounds.run("inspect no-such-directory")
    assert plain.status == 1
    assert "Traceback" not in plain.err
    assert "no-such-directory" in plain.err
    for line in ("--debug inspect no-such-directory", "inspect no-such-directory --debug"):
        command = [sys.executable, "-m", "prunecli", *line.split()]
        assert "Traceback" in subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("prune", "'prune-experts', 'prune-heads', 'prune-ffn' or 'prune-layers'?"),
        ("prune-experts --sparsity 0.5", "--ratio?"),
        ("score-heads --metrics x", "--metric?"),
        ("inspect --model demo", "the argument CHECKPOINT (prunecli inspect CHECKPOINT)?"),
        ("inspect --verbose", "--debug?"),
        ("xyzzy", None),
    ],
)
def test_near_names(line, suggestion, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    ended = rounds.run(line)
    assert ended.status == 2
    assert ("Did you mean" in ended.err) == (suggestion is not None)
    assert suggestion is None or f"Did you mean {suggestion}" in ended.err


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [(command, *names) for command in RENAMED for names in RENAMED[command].items()],
)
def test_old_names_of_options(command, old, new):
    known, values = parameters()[command], ONLY_WITH.get((command, old))
    assert (old[2:] in known) == (values is not None)
    value = "" if known[new[2:]].is_switch else f"={values[0] if values else 8}"
    line = f"{old} is called {new} now.\n"
    assert rounds.run(f"{command} nowhere {old}{value}").err.startswith(line)
    for other in (f"{new}{value} -- {old}", f"--output={old}"):
        assert line not in rounds.run(f"{command} nowhere {other}").err


def test_a_home_directory_within_quotes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for line in ("inspect ~/gone", "report ~/gone", "evaluate --text=name=~/gone"):
        assert f"Error: {tmp_path}/gone: no such" in rounds.run(line).err
    for same in ("~", "a~/b", "./~/b", "x=y=z=~/b", "-1"):
        assert expanded(same) == same


@pytest.mark.parametrize("line", ["inspect --json", "no-such-command"])
def test_a_reader_that_goes_away_ends_it_quietly(line):
    """`prunecli … | head -1`, and `2>&1`: 141 as of any program, or 0 where all of it had been written before."""
    started = subprocess.Popen(
        [sys.executable, "-m", "prunecli", *line.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    started.stdout.close()
    if line == "no-such-command":  # which writes nothing but this
        started.stderr.close()
    else:
        assert b"Traceback" not in (said := started.stderr.read())
        assert b"BrokenPipe" not in said
        started.stderr.close()
    assert started.wait() == 141


@pytest.mark.parametrize("line", ["--version >&-", "inspect 2>&-"])
def test_an_output_that_is_closed_is_no_fault(line):
    command = f"{shlex.quote(sys.executable)} -m prunecli {line}"
    ended = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "" or "No checkpoint given" not in ended.stdout


@pytest.mark.parametrize(
    ("line", "message", "remedy", "status"),
    [
        ("inspect nowhere --json", "nowhere: no such directory", "Give a checkpoint directory", 1),
        ("inspect --json --fit-beam 2", "--fit-beam goes with --fit", "Give --fit", 2),
        ("no-such-command --json", "No such command 'no-such-command'", None, 2),
    ],
)
def test_failures_are_json_for_those_who_ask_for_it(line, message, remedy, status):
    result = rounds.run(line)
    payload = result.json
    assert (payload["format"], payload["prunecli"]) == ("prunecli.error/1", __version__)
    error = payload["error"]
    assert error["message"].startswith(message)
    assert error["remedy"] is None if remedy is None else error["remedy"].startswith(remedy)
    assert error["status"] == result.status == status
    assert message.split(":")[0] in result.err, "in words too"
    assert rounds.run(line.replace(" --json", "")).out == ""


@pytest.mark.parametrize(
    ("number", "ending"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
def test_a_signal_waits_until_numpy_is_there(number, ending, monkeypatch):
    """Its C code makes an ImportError of what is raised in the middle of its import: a fault in prunecli, it said."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(np.__spec__, "_initializing", True, raising=False)
    monkeypatch.setattr(app, "_CAME", [])
    try:
        app._heed_signals()
        os.kill(os.getpid(), number)  # nothing is raised here
        monkeypatch.setattr(np.__spec__, "_initializing", False)
        with pytest.raises(ending):
            time.sleep(10)
        with pytest.raises(SystemExit) as ended:
            app._end(ImportError("what an import made of it"), debug=False, as_json=False)
        assert ended.value.code == 128 + number
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_no_long_work_for_a_place_that_takes_nothing(monkeypatch):
    monkeypatch.setattr(
        os, "access", lambda _path, _mode: False
    )  # a read-only disk; root may write all others
    with pytest.raises(OutputError, match="nothing can be written in"):
        refuse_unwritable(Path("gates.json"), force=False)
    with pytest.raises(OutputError, match="nothing can be written in"):
        refuse_target(Path("out"), force=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_word_of_a_help_is_cut(name, monkeypatch, capsys):
    """Names of options and values are whole, and stand side by side; the whole fits two screens."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(app.app, "registered_commands", [])
    app._register([name])
    with pytest.raises(SystemExit):
        app.app(args=[name, "--help"], prog_name="prunecli")
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert len(shown.splitlines()) <= 96
    assert re.findall(r"(\S*\w)…", shown) == []
    named = re.findall(r"│ (--[\w-]+) +(-\w +)?(\S+)?", shown)
    assert len(named) > 1
    metavars = {option: metavar for option, _, metavar in named}
    for one in options_of(command(name)).list_options().values():
        if not one.is_switch:
            assert metavars.get(one.flag, one.metavar) == one.metavar


def test_what_options_need_and_exclude_are_options():
    kinds = [options_of(command(name)) for name in parameters()]
    fields = {field for kind in kinds for field in kind.model_fields}
    for one in (one for kind in kinds for one in kind.list_options().values()):
        assert fields.issuperset(re.sub("=\\S*", "", f"{one.needs} {one.excludes}").split())


def test_quiet_leaves_warnings_alone(capsys):
    class Quiet(Options):
        quiet: bool = option("No notes.", False)

    @command_of
    def command(options: Quiet):
        console.note("No checkpoint given.")
        console.warn("This file is damaged.")

    command(quiet=False)
    assert capsys.readouterr().err.splitlines() == ["No checkpoint given.", "This file is damaged."]
    command(quiet=True)
    assert capsys.readouterr().err.splitlines() == ["This file is damaged."]
    console.note("Afterwards.")
    assert capsys.readouterr().err == "Afterwards.\n"


# What is said of failures, those of transformers at work and of figures that cannot be among them.


@pytest.mark.parametrize(
    ("error", "text", "status"),
    [
        (CheckpointError("model: bad", "Do this."), "Error: model: bad\nDo this.", 1),
        (UsageError("--ratio 2: no"), "Error: --ratio 2: no", 2),
        (OSError(errno.ENOSPC, "full", "out/x"), "no space left on the disk (out/x)", 1),
        (PermissionError(errno.EACCES, "no", "out/x"), "no permission (out/x).\nChange the permissions", 1),
        (OSError(errno.ECONNRESET, "Reset"), "Error: Reset.\nRun the same", 1),
        (RuntimeError(f"{failures.LOOP}'x'"), "('x').\nCheck this path", 1),
        (CheckpointError("model: no config.json"), "model: no config.json\nFetch or copy the checkpoint", 1),
        (MemoryError(), "out of memory", 1),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "out of memory on ", 1),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory on ", 1),
        (KeyboardInterrupt(), "Interrupted", 130),
    ],
)
def test_failures_become_plain_lines(error, text, status):
    said, ended = failures.describe(error)
    assert text in said
    assert ended == status
    assert len(said.splitlines()) <= 2


def test_names_in_other_libraries_messages_are_no_options():
    with pytest.raises(CheckpointError) as caught, damaged("model: damaged", "Copy it."):
        raise ValueError("`get_seq_length` failed")
    assert failures.describe(caught.value)[0].startswith(
        "Error: model: damaged (ValueError: 'get_seq_length' failed)"
    )


def test_a_figure_that_no_result_holds_is_said():
    with pytest.raises(ValueError, match="1 validation error") as caught:
        Way.model_validate({"dtype": "float32", "weight_bytes": 1, "needed_bytes": -3, "fits": True})
    said, status = failures.describe(caught.value)
    assert said.startswith("Error: needed_bytes of the result comes out as -3: ")
    assert (len(said.splitlines()), status) == (2, 1)


def test_a_config_that_transformers_makes_and_cannot_run():
    """T5 divides by the logarithm of this distance at work, and looks at no value before."""
    tiny_family("model", "t5", num_layers=1, num_decoder_layers=1, relative_attention_max_distance=0)
    write_files("data", dict.fromkeys(("val.de", "val.en"), "a hen\n" * 40))
    ran = run("score-heads model --data data --pairs de-en --split val -o out.json")
    assert ran.status == 1
    assert "ValueError: math domain error" in ran.err.splitlines()[-2]
    assert names() == ["data", "model"]


def test_a_link_that_leads_to_itself():
    Path("loop.json").symlink_to("loop.json")
    for line in ("compare-heads loop.json heads.json", "inspect loop.json", "report loop.json"):
        ran = run(line)
        assert ran.status == 1, ran.trace
        assert "loop.json" in ran.err.splitlines()[0]


# Commands that stream tensors run no model: they need neither torch nor transformers.


CHILD = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is wanted, and must not be", name=name)

absent = {"transformers", "torch", "tokenizers", "accelerate"}
sys.meta_path.insert(0, Absent())
from prunecli.commands.app import main

found = []
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as end:
        found.append(end.code or 0)
print(json.dumps(found))
"""


def test_what_only_rewrites():
    tiny_nllb_moe("experts")
    drawn = "--metric random --ratio 0.5 --output"
    lines = [
        "inspect experts",
        "inspect experts --json",
        f"prune-experts experts {drawn} 1",
        f"prune-experts experts {drawn} 2 --dry-run",
        f"prune-heads experts {drawn} 3",
        "share-ffn experts --preset SharedEnc --dense-only --output 4",
    ]
    done = subprocess.run([sys.executable, "-c", CHILD, *lines], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0] * len(lines), done.stderr
    assert names() == ["1", "3", "4", "experts"]
