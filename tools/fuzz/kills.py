"""Kill rounds: each writing command is stopped at a random moment, then looked at, then run again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from prunecli.commands.app import main
from prunecli.model.checkpoint import open_model
from prunecli.tensors.transaction import NAME
from tests.hub_server import point_at, serving
from tools.fuzz.materials import SERVED
from tools.fuzz.rounds import contents
from tools.fuzz.writers import Writer

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STATUS = {signal.SIGTERM: (143, 130, -15), signal.SIGINT: (130, -2), signal.SIGKILL: (-9,)}
"""Statuses to end with: the last where the command had not begun; 130 where `finetune` ended its step first."""


@dataclass
class Kill:
    """One kill: when, by what, and what is wrong."""

    command: str
    number: signal.Signals
    after: float
    status: int = 0
    finished: bool = False
    kept: bool = False
    left: bool = False
    faults: list[str] = field(default_factory=list)


class Stable:
    """Starts commands by forking this process, where everything heavy is imported: a start takes no time.

    Attributes:
        hub: address of the hub that they ask; empty: none.
    """

    hub = ""

    def start(self, words: list[str], folder: Path) -> int:
        """The id of a process that runs `prunecli WORDS`; what it says goes to FOLDER/../said."""
        # Until it is ready, the kill waits: it is meant for the command.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        child = os.fork()
        if child:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            return child
        os.chdir(folder)
        said = os.open(folder.parent / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = 70
        try:
            if self.hub:
                point_at(self.hub, folder / "cache", pytest.MonkeyPatch())
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            main(words)
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def end(self, child: int) -> int:
        """Waits for it; its exit status, or minus the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Fresh(Stable):
    """Starts commands as a user does: a new interpreter, which may be killed while it imports."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, words: list[str], folder: Path) -> int:
        """See `Stable.start`."""
        asked = {"HF_ENDPOINT": self.hub, "HF_HUB_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "0"}
        one_thread = {"OMP_NUM_THREADS": "1"}  # the last digits of a sum depend on the number of threads
        with (folder.parent / "said").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "prunecli", *words],
                cwd=folder,
                stdout=said,
                stderr=said,
                env={**os.environ, **one_thread, **(asked if self.hub else {})},
            )
        self._running[process.pid] = process
        return process.pid

    def end(self, child: int) -> int:
        """See `Stable.end`."""
        return self._running.pop(child).wait()


@contextmanager
def served(writer: Writer, material: Path, starter: Stable) -> Iterator[None]:
    """A process with a hub that has what the writer asks for, where it asks for anything."""
    if not writer.served:
        yield
        return
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with serving() as hub:
            hub.add(SERVED, material / writer.served)
            hub.longest = 5000  # so that a kill falls between two answers
            os.write(writing, hub.url.encode())
            signal.pause()
    starter.hub = os.read(reading, 100).decode()
    try:
        yield
    finally:
        starter.hub = ""
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def fill(writer: Writer, material: Path, folder: Path) -> None:
    """A new folder with what the command reads."""
    folder.mkdir()
    for name in writer.needs:
        copy = shutil.copytree if (material / name).is_dir() else shutil.copyfile
        copy(material / name, folder / name)


def reference(writer: Writer, material: Path, work: Path, stable: Stable) -> tuple[dict[str, str], float]:
    """What the command makes when nothing disturbs it, and the seconds that it takes."""
    folder = work / "folder"
    fill(writer, material, folder)
    before = contents(folder)
    start = time.monotonic()
    status = stable.end(stable.start(writer.command.split(), folder))
    seconds = time.monotonic() - start
    if status != 0:
        raise RuntimeError(f"{writer.command}: {(work / 'said').read_text()}")
    made = _made(folder, before)
    shutil.rmtree(folder)
    return made, seconds


def kill(
    writer: Writer,
    material: Path,
    work: Path,
    stable: Stable,
    whole: tuple[dict[str, str], float],
    rng: Random,
) -> Kill:
    """One round; an old result stands in the way in every third."""
    made, seconds = whole
    result = Kill(writer.name, rng.choice(SIGNALS), rng.uniform(0, 1.02 * seconds))
    folder = work / "folder"
    fill(writer, material, folder)
    inputs = contents(folder)
    old = _old_result(writer, material, folder) if rng.random() < 0.33 else {}
    words = [*writer.command.split(), *(["--force"] if old else [])]
    child = stable.start(words, folder)
    time.sleep(result.after)
    try:
        os.kill(child, result.number)
    except ProcessLookupError:
        result.finished = True
    result.status = stable.end(child)
    result.finished = result.status == 0
    _look(writer, folder, inputs, old, work, result)
    _again(writer, folder, inputs, made, stable, work, result)
    shutil.rmtree(folder)
    return result


def _old_result(writer: Writer, material: Path, folder: Path) -> dict[str, str]:
    """A result of an earlier run: another checkpoint, or a file of another content."""
    if "-o out." in writer.command:
        output = writer.command.rpartition("-o ")[2]
        (folder / output).write_text('{"format": "prunecli.old/1"}\n')
    elif "-o out" in writer.command:
        shutil.copytree(material / "reduced-1", folder / "out")
    return {name: held for name, held in contents(folder).items() if name.split("/")[0].startswith("out")}


def _look(
    writer: Writer, folder: Path, inputs: dict[str, str], old: dict[str, str], work: Path, result: Kill
) -> None:
    said = (work / "said").read_text(errors="replace")
    after = contents(folder)
    if "Traceback" in said or "Exception ignored" in said:
        result.faults.append(f"a traceback: {said[-2000:]}")
    if result.status not in (0, *STATUS[result.number]):
        result.faults.append(f"exit status {result.status} after {result.number.name}: {said[-300:]}")
    if any(after.get(name) != held for name, held in inputs.items()):
        result.faults.append("an input changed")
    new = {name: held for name, held in after.items() if name not in inputs}
    tops = {name.split("/")[0] for name in new}
    hidden = {name for name in tops if name.endswith((".partial", ".old"))} - set(writer.states)
    begun = {name for name in hidden if (folder / name / NAME).is_file()}
    result.left, result.kept = bool(hidden), bool(tops & set(writer.states) or begun)
    if result.number == signal.SIGTERM:
        hidden -= begun
    if hidden and result.number != signal.SIGKILL:
        result.faults.append(f"{result.number.name} left {sorted(hidden)[0]} behind")
    output = {
        name: held for name, held in new.items() if name.split("/")[0] in ("out", "out.json", "out.html")
    }
    swapped = any(name.endswith(".old") for name in hidden)
    if old and not output and not swapped:
        result.faults.append("the old result is gone")
    if output and output != {name: old[name] for name in old if name in output}:
        result.faults += [f"a half output: {fault}" for fault in _unreadable(folder)]


def _unreadable(folder: Path) -> list[str]:
    try:
        if (folder / "out").exists():
            open_model(folder / "out").check()
        if (folder / "out.json").exists():
            json.loads((folder / "out.json").read_text())
        if (folder / "out.html").exists() and not (folder / "out.html").read_text().rstrip().endswith(
            "</html>"
        ):
            return ["out.html ends early"]
    except Exception as error:
        return [repr(error)]
    return []


def _made(folder: Path, inputs: dict[str, str]) -> dict[str, str]:
    """What is new in a folder, but for the cache of a hub; results without their command, which may have --force."""
    found = contents(folder)
    for name in found.keys() & {"out.json"}:
        found[name] = re.sub(r'"command": \[[^]]*\]', "", (folder / name).read_text())
    return {name: found[name] for name in found if name not in inputs and name.split("/")[0] != "cache"}


def _again(
    writer: Writer,
    folder: Path,
    inputs: dict[str, str],
    made: dict[str, str],
    stable: Stable,
    work: Path,
    result: Kill,
) -> None:
    """The same command goes through, gives the same bytes, and leaves nothing of the killed one."""
    status = stable.end(stable.start([*writer.command.split(), "--force"], folder))
    said = (work / "said").read_text(errors="replace")
    if status != 0:
        result.faults.append(f"does not go through afterwards: {said[-500:]}")
        return
    after = _made(folder, inputs)
    odd = sorted(set(after) ^ set(made))
    if odd:
        result.faults.append(f"{odd[0]} is {'left' if odd[0] in after else 'not made'} afterwards")
    if writer.same and after != made and not odd:
        different = next(name for name in made if made[name] != after[name])
        result.faults.append(f"{different} differs from that of an undisturbed run")
