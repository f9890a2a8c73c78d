"""Full disks, signals and damage in the middle of writing: nothing is left behind, input and old results stay."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prunecli import pipeline
from prunecli.errors import OutputError
from prunecli.tensors import copying, writer
from tests.commands.calls import names
from tests.contracts.method_contract import digests, written
from tests.failing import failing_after
from tests.selections import kept_experts
from tests.tiny import tiny_nllb_moe

KEPT = {f"model.{side}.layers.{n}.ffn": (6, 1, 3) for side in ("encoder", "decoder") for n in (1, 3)}


@pytest.fixture(autouse=True)
def source():
    tiny_nllb_moe("in")


def pruned(dtype: str | None = None, **options: Any) -> None:
    written("in", kept_experts(KEPT, dtype=dtype), "out", **options)


def everything() -> dict[str, Any]:
    """Every name here -> digests of what it holds."""
    return {name: digests(name) for name in names()}


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    ("owner", "function", "calls", "dtype"),
    [
        (writer, "reserve", 0, None),
        (os, "pwrite", 0, None),
        (os, "pwrite", 7, None),
        (os, "pwrite", 7, "bfloat16"),
        (shutil, "copyfile", 2, None),
        (pipeline, "write_json", 0, None),
    ],
)
def test_full_disk(owner, function, calls, dtype, existing, monkeypatch):
    """Wherever it shows: reserving, writing, or with the small files."""
    if existing:
        pruned()
    before = everything()
    monkeypatch.setattr(copying, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(owner, function, failing_after(calls, getattr(owner, function)))
    with pytest.raises(OutputError, match=r"out: the disk is full; nothing was written\n.*another path"):
        pruned(dtype, force=existing)
    assert everything() == before


def test_a_disk_that_fails_late_keeps_the_old_result(monkeypatch):
    """The file system notices the fault only when it is asked to sync."""
    pruned()
    before = everything()
    monkeypatch.setattr(os, "fsync", failing_after(1, os.fsync))
    with pytest.raises(OutputError, match="the disk is full"):
        pruned("float16", force=True)
    assert everything() == before


SLOW = """
import sys, time
from prunecli.tensors.stream import Block

real = Block.carry_out

def slow(block):
    count = real(block)
    print("moved", flush=True)
    time.sleep(0.2)
    return count

Block.carry_out = slow
from prunecli.commands.app import main
main()
"""


@contextmanager
def started(script: str = SLOW) -> Iterator[subprocess.Popen[str]]:
    """`prune-experts` in a process of its own, caught in the middle of writing."""
    line = "prune-experts in -o out --force --metric random --ratio 0.5 --dtype float16"
    command = [sys.executable, "-c", script, *line.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert any("moved" in line for line in process.stdout)  # several threads may write into one
        try:
            yield process
        finally:
            process.kill()  # one that hangs would be waited for


@pytest.mark.parametrize(
    ("number", "status", "existing"),
    [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, False), (signal.SIGHUP, 129, True)],
)
def test_signals_in_the_middle(number, status, existing):
    if existing:
        pruned()
    before = everything()
    with started() as process:
        assert any(name.endswith(".partial") for name in names())
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert everything() == before


LATE = """
import os, signal, threading, time
from prunecli.commands import app

class Late(threading.Condition):
    def __enter__(self):
        taken = super().__enter__()
        if when == "taken":
            os.kill(os.getpid(), signal.SIGINT)
        return taken

    def __exit__(self, *error):
        if when == "given back":
            os.kill(os.getpid(), signal.SIGINT)
        return super().__exit__(*error)

app._heed_signals()
for when in ("taken", "given back"):
    lock = Late(threading.Lock())
    try:
        with lock:
            time.sleep(5)
        time.sleep(5)
    except KeyboardInterrupt:
        assert lock.acquire(blocking=False)
    else:
        raise SystemExit("not interrupted")
"""


def test_signals_leave_no_lock_taken():
    """A pool of threads would wait for it without end."""
    subprocess.run([sys.executable, "-c", LATE], check=True)


def test_a_third_one_ends_it_at_once():
    """Reads that never come back, as from a network that is gone, would keep it."""
    with started(SLOW.replace("0.2", "60")) as process:
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        process.communicate(timeout=20)
    assert process.returncode in (130, -signal.SIGINT)  # the other one when Python itself has begun to end
    pruned()
    assert names() == ["in", "out"]


SMALL_DISK = """
import sys
from prunecli.tensors import transaction, writer

if sys.argv.pop(1) == "unforeseen":  # another process fills the disk after the check
    transaction.SPARE_BYTES = -(1 << 40)
if sys.argv.pop(1) == "unreserved":
    writer.reserve = lambda target, nbytes: None
from prunecli.commands.app import main
main()
"""


def on_small_disk(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run with a file system of 64 KiB at `small` that only this process sees; then list what it holds."""
    script = 'mount -t tmpfs -o size=64k none "$0" || exit 99; "$@"; status=$?; ls -A "$0" >&2; exit $status'
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "small"]
    try:
        done = subprocess.run([*unshare, *command], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode == 99 or done.stderr.startswith("unshare:"):
        pytest.skip("this user may not mount a file system")
    return done


@pytest.mark.parametrize(
    ("check", "reserving", "message"),
    [
        ("foreseen", "reserved", " MiB are needed, 64.00 KiB are free"),
        ("unforeseen", "reserved", "small/out: the disk is full; nothing was written"),
        ("unforeseen", "unreserved", "small/out: the disk is full; nothing was written"),
    ],
)
def test_disk_that_is_really_full(check, reserving, message):
    Path("small").mkdir()
    line = f"{check} {reserving} prune-experts in --metric random --ratio 0.5 -o small/out"
    done = on_small_disk([sys.executable, "-c", SMALL_DISK, *line.split()])
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stderr.split())  # a long path may be wrapped
    assert said.endswith(f"{message} Free some space, or choose another path."), "no listing after it"
