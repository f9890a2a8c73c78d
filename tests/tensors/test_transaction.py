"""A result appears whole or not at all, whatever happens meanwhile."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from prunecli.errors import OutputError
from prunecli.tensors import transaction
from prunecli.tensors.transaction import NAME, Journal, Store, new_directory
from tests.commands.calls import names

OUT, CONFIG = Path("out"), Path("out/config.json")


def result(name: str | Path, text: str = "old") -> Path:
    directory = Path(name)
    directory.mkdir()
    (directory / "config.json").write_text(text)
    return directory


def make(target: str, **options: Any) -> None:
    with new_directory(Path(target), **{"force": False, "needed_bytes": 3, **options}) as directory:
        (directory / "config.json").write_text("new")
        (directory / "sub").mkdir()
        (directory / "sub" / "file").write_text("x")


def fail(error: BaseException, force: bool = False) -> None:
    with new_directory(OUT, force=force, needed_bytes=1) as directory:
        (directory / "config.json").write_text("half")
        raise error


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(143), MemoryError()])
@pytest.mark.parametrize("existing", [False, True])
def test_nothing_is_left_of_a_failure(error, existing):
    if existing:
        result("out")
    with pytest.raises(type(error)):
        fail(error, force=existing)
    assert names() == (["out"] if existing else [])
    assert not existing or CONFIG.read_text() == "old"


def test_force_swaps_at_the_end():
    (result("out") / "stale").write_text("x")
    with new_directory(OUT, force=True, needed_bytes=1) as directory:
        (directory / "config.json").write_text("new")
        assert CONFIG.read_text() == "old"
    assert names() == ["out"]
    assert names(OUT) == ["config.json"]
    assert CONFIG.read_text() == "new"


def test_force_replaces_only_checkpoints():
    Path("home").mkdir()
    Path("home/thesis.tex").write_text("x")
    Path("file").write_text("x")
    Path("link").symlink_to(result("model"))
    for name in ("home", "file", "link"):
        with pytest.raises(OutputError, match="is not a checkpoint directory"):
            make(name, force=True)
    assert names() == ["file", "home", "link", "model"]
    assert Path("home/thesis.tex").exists()


@pytest.mark.parametrize("target", ["in", "in/out", ".", "other/../in", "link"])
@pytest.mark.parametrize("force", [False, True])
def test_output_may_not_overlap_the_input(target, force):
    source = result("in")
    Path("other").mkdir()
    Path("link").symlink_to(source)
    with pytest.raises(OutputError, match="overlaps the checkpoint"):
        make(target, force=force, source=source)
    assert (source / "config.json").read_text() == "old"


def test_target_that_appears_meanwhile_is_kept():
    with (
        pytest.raises(OutputError, match="exists already"),
        new_directory(OUT, force=False, needed_bytes=1),
    ):
        result("out", "of another process")
    assert names() == ["out"]
    assert CONFIG.read_text() == "of another process"


def test_lack_of_room_is_seen_first(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Mock(free=10**9))
    with pytest.raises(OutputError, match=r"2\.81 GiB are needed, 953\.67 MiB are free"):
        make("out", needed_bytes=3 * 10**9)
    assert names() == []


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "out: the disk is full; nothing was written"),
        (errno.EDQUOT, "out: the disk is full; nothing was written"),
        (errno.EIO, r"out: not written: .* \(shard\)"),
    ],
)
def test_failures_of_the_disk(number, text):
    with pytest.raises(OutputError, match=text):
        fail(OSError(number, os.strerror(number), "shard"))
    assert names() == []


def test_a_rename_that_fails_gives_the_old_result_back(monkeypatch):
    result("out")
    real = Path.rename

    def rename(self, to):
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return real(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OutputError, match="not written"):
        make("out", force=True)
    assert names() == ["out"]
    assert CONFIG.read_text() == "old"


def left_by_a_killed_process(name: str) -> Path:
    code = "import os, signal, sys; from pathlib import Path; from prunecli.tensors.transaction import new_directory\n"
    code += "with new_directory(Path(sys.argv[1]), force=False, needed_bytes=0): os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code, name], check=False)
    (made,) = Path().glob(f".{name}.*.partial")
    return made


def test_leftovers_of_killed_processes_go():
    left_by_a_killed_process("out")
    left_by_a_killed_process("other").rename(".other.partial")
    next(Path().glob(".other.*.lock")).unlink()
    # Of 0.2.0; the ids of running processes: numbers are used again.
    for name in (f".out.{os.getppid()}.partial", f".out.{os.getpid()}.partial", ".out.x.partial"):
        result(name)
    make("out")
    assert set(names()) == {".other.partial", ".out.x.partial", "out"}


def test_a_writer_of_the_same_process_id_is_left_alone():
    """In two containers both are process 1."""
    with new_directory(OUT, force=True, needed_bytes=0) as first:
        result(first / "mine")
        make("out")
        assert (first / "mine" / "config.json").is_file()
        (first / "config.json").write_text("last")
    assert names() == ["out"]
    assert CONFIG.read_text() == "last"


def test_what_another_machine_left_stays():
    foreign = left_by_a_killed_process("out").rename(".out.1-0123456789abcdef.partial")
    make("out")
    assert names() == [foreign.name, "out"]


def test_without_locks_nothing_is_taken_for_abandoned(monkeypatch):
    left = left_by_a_killed_process("out")
    refused = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(transaction.fcntl, "flock", refused)
    make("out")
    assert names() == [left.name, "out"]


def test_a_lock_whose_file_was_removed_is_none(monkeypatch):
    """Its holder removes the file at the end, after this process has opened it."""
    path, flock, calls = Path("lock"), transaction.fcntl.flock, []

    def late(descriptor, kind):
        calls.append(kind)
        if len(calls) == 1:
            path.unlink()
        flock(descriptor, kind)

    monkeypatch.setattr(transaction.fcntl, "flock", late)
    held = transaction.acquire(path)
    with pytest.raises(BlockingIOError):
        transaction.acquire(path)
    os.close(held)


def test_a_killed_swap_gives_the_old_result_back():
    result(".out.1.old")
    with pytest.raises(OutputError, match="exists already"):
        make("out")
    assert names() == ["out"]
    assert CONFIG.read_text() == "old"


def test_is_on_the_disk_before_an_old_result_goes(monkeypatch):
    synced = []
    real = transaction.sync

    def sync(path):
        synced.append(path.name.partition("-")[0])
        real(path)

    monkeypatch.setattr(transaction, "sync", sync)
    make("out")
    assert synced == []
    make("out", force=True)
    assert synced == ["file", "sub", "config.json", f".out.{os.getpid()}"]


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
def test_signals_during_the_clean_up_wait(number, error, monkeypatch):
    real = shutil.rmtree

    def slow(path, ignore_errors=False):
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        real(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", slow)
    with pytest.raises(error):
        fail(ValueError())
    assert names() == []


# The store for unfinished work: what it takes up again, and what it takes no word for.


@pytest.fixture
def journal():
    """The journal of two complete files, read again; beside these a third one that is not, and a folder."""
    for name, size in (("a", 5), ("b", 0), ("c", 1)):
        Path(name).write_bytes(b"x" * size)
    Path("folder/inner").mkdir(parents=True)
    made = Journal(Path(), "key")
    made.note("a", 5)
    made.note("b", 0)
    return Journal(Path(), "key")


def test_records_are_found_again_by_the_same_work():
    path = Path("store")
    store = Store(path, "work")
    store.put("a", {"text": "un\nchat “noir”"})
    store.put("b", [1, 2.5, None])
    store.put("b", [3])
    assert Store(path, "work").records == store.records == {"a": {"text": "un\nchat “noir”"}, "b": [3]}
    assert Store(path, "other work").records == {}
    assert Store(None).records == {}
    store.remove()
    store.remove()
    assert not path.exists()


@pytest.mark.parametrize("cut", [1, 13, 33])
def test_a_line_that_was_cut_short_is_left_out_and_the_next_is_whole(cut):
    path = Path("store")
    Store(path).put("a", "first")
    Store(path).put("b", "second")
    path.write_bytes(path.read_bytes()[:-cut])
    again = Store(path)
    assert again.records == {"a": "first"}
    again.put("c", "third")
    assert Store(path).records == {"a": "first", "c": "third"}


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "[" * 100_000, '{"record": ["", "a"]}', '{"record": 3}', "\0"]
)
def test_damage_is_nothing(journal, text):
    journal.path.write_text(text)
    assert Journal(Path(), "key").records == {}


def test_a_journal_names_what_is_complete(journal):
    assert journal.nbytes == 5
    assert [journal.has(name) for name in "abc"] == [True, True, False]
    journal.tidy()
    assert names() == [NAME, "a", "b"]
    journal.remove()
    assert names() == ["a", "b"]


def test_a_journal_takes_no_word_for_what_lies_elsewhere(journal):
    Path("../outside").write_bytes(b"123")
    Path("link").symlink_to("a")
    sizes = {"../outside": 3, "/etc/passwd": 1, "link": 5, "a": 6, "missing": 0, "folder": 4096}
    for name, size in sizes.items():
        journal.put(name, [size, 0, ""])
    assert set(Journal(Path(), "key").records) == {"b"}
