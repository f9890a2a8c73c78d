"""One fuzzing round: damage files, run a command in this process, check what became of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest

from prunecli.methods.experts import collect
from prunecli.model.checkpoint import open_model
from prunecli.tensors import copying, transaction, writer
from prunecli.tensors.hub.fetch import commit_of
from tests import forked
from tests.fuzz.mutations import damage_file
from tests.fuzz.rounds import Ran, run
from tests.hub_server import Fault, HubServer, point_at, serving
from tools.fuzz.cases import CASES, Case, copy_needed
from tools.fuzz.hubs import damage_hub
from tools.fuzz.materials import INTERRUPTED, PREPARATION, SERVED, STREAM, UNFINISHED, write_models

OWN_NAMES = (
    *("out", "out.json", "out.csv", "out.html", "out.finetune.json", "hyp", "tuned", "tuned.finetune.json"),
    "new",
)
"""What the commands of the cases write."""


STATES = (
    *(".out.json.partial", ".out.json.layers", ".out.json.layers.0of2", ".out.json.layers.1of2"),
    *("out.training", "tuned.training", ".prunecli", "cache", UNFINISHED),
)
"""What the commands may leave behind, so that they can go on."""


@dataclass
class Round:
    """A round and what is wrong with it; nothing, if all is well."""

    kind: str
    command: str
    damage: list[str]
    ran: Ran
    faults: list[str] = field(default_factory=list)


def run_together(command: str, folder: Path, processes: int, limit_s: float) -> Ran:
    """`prunecli COMMAND` in so many processes that know of each other; the worst of their exit statuses."""
    with contextlib.chdir(folder):
        started = forked.start(command, processes=processes)
    said, trace = [], ""
    for process in started:
        try:
            said.append(process.communicate(2 * limit_s))
        except TimeoutError:
            trace = "TooLong"
        shutil.rmtree(process.files[0].parent)
    statuses = [process.returncode for process in started]
    status = None if None in statuses else max(statuses, key=lambda one: abs(one or 0))
    return Ran(status, "".join(out for out, _ in said), "".join(err for _, err in said), 0.0, trace)


def prepare(folder: Path) -> None:
    """Models, and everything that the commands make of them: what the rounds damage."""
    write_models(folder)
    for command in PREPARATION:
        ran = run(command, folder, 300)
        if ran.status != 0:
            raise RuntimeError(f"prunecli {command}: {ran.err}{ran.trace}")
        for option, name in (("prune-experts", "experts.json"), ("prune-heads", "kept-heads.json")):
            if command.startswith(option) and "--dry-run" in command:
                (folder / name).write_text(ran.out)
    for name, command in INTERRUPTED.items():
        # Kept at every batch, and not removed at the end: as if the run had been killed before it wrote the result.
        with patch.object(collect, "SAVE_EVERY_S", 0.0), patch.object(Path, "unlink"):
            ran = run(command, folder, 300)
        if ran.status != 0:
            raise RuntimeError(f"prunecli {command}: {ran.err}{ran.trace}")
        (folder / "out.json").unlink()
        _set_aside(folder, name, ".out.json.partial")
    for served in range(120, 300, 10):
        with _serving(folder / "moe-sharded", folder / "cache") as hub:
            hub.faults = [*[None] * served, *[Fault(status=503)] * 1000]
            hub.longest = 5000
            run(STREAM, folder)
        shutil.rmtree(folder / "cache")
        if left := [*folder.glob(".out.*.partial")]:
            break
    left[0].rename(folder / UNFINISHED)
    _set_aside(folder, "state-stream", UNFINISHED)


def _set_aside(folder: Path, name: str, state: str) -> None:
    (folder / name).mkdir()
    (folder / state).rename(folder / name / state)


def contents(folder: Path) -> dict[str, str]:
    """Path of every file and link below `folder` -> what it holds."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*files, *folders):
            path = Path(root) / name
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = f"-> {path.readlink()}"
            elif path.is_file():
                found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[key] = "folder"
    return found


def damage_some(case: Case, folder: Path, rng: Random) -> list[str]:
    """Damage one or two of the files that the case names; returns what was done."""
    files = sorted({path for target in case.targets for path in folder.glob(target) if path.is_file()})
    chosen = rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2))))
    return [f"{path.relative_to(folder)}: {damage_file(path, rng)}" for path in chosen]


def play(
    seed: str,
    material: Path,
    work: Path,
    cases: tuple[Case, ...] = CASES,
    limit_s: float = 30.0,
    damage: Callable[[Case, Path, Random], list[str]] = damage_some,
) -> Round:
    """The round of this seed, in a folder below `work` that is removed afterwards."""
    rng = Random(seed)
    case = rng.choices(cases, [case.weight for case in cases])[0]
    command = rng.choice(case.commands)
    folder = work / "round"
    copy_needed(case, material, folder)
    try:
        done = damage(case, folder, rng)
        before, outside = contents(folder), sorted(work.iterdir())
        with _hub(case, folder, rng, done):
            if case.processes > 1:
                ran = run_together(command, folder, case.processes, limit_s)
            else:
                ran = run(command, folder, limit_s)
        made = Round(case.kind, command, done, ran)
        made.faults += [*_told(ran), *_left(folder, before, ran, command)]
        if sorted(work.iterdir()) != outside:
            made.faults.append("wrote outside of its folder")
        return made
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _hub(case: Case, folder: Path, rng: Random, damage: list[str]) -> Iterator[None]:
    """The hub that the case asks for, which may answer what cannot be."""
    if not case.served:
        yield
        return
    with _serving(folder / case.served, folder / "cache") as hub:
        damage += damage_hub(hub, rng)
        yield


@contextlib.contextmanager
def _serving(model: Path, cache: Path) -> Iterator[HubServer]:
    """A hub that has this directory, and that huggingface_hub asks."""
    with serving() as hub, pytest.MonkeyPatch.context() as patched:
        point_at(hub.url, cache, patched)
        patched.setattr(writer, "NOTE_BYTES", 1)
        for module, limit in ((writer, "JOB_BYTES"), (copying, "REQUEST_BYTES")):  # so that there are many
            patched.setattr(module, limit, 8000)
        commit_of.cache_clear()
        hub.add(SERVED, model)
        yield hub


def _told(ran: Ran) -> Iterator[str]:
    if ran.status is None:
        yield (
            "took too long"
            if "TooLong" in ran.trace
            else "a traceback: " + ran.trace.strip().splitlines()[-1]
        )
    elif ran.status == 70:
        yield f"a bug: {ran.err.strip().splitlines()[-2]}"
    elif ran.status not in (0, 1, 2):
        yield f"exit status {ran.status}"
    elif ran.status != 0 and "Error" not in ran.err:
        yield "failed without a word"
    if "Traceback" in ran.err:
        yield "printed a traceback"
    if "out of memory" in ran.err:
        yield "asked for more memory than there is"
    if any(len(line) > 3000 for line in ran.err.splitlines()):
        yield "a message of thousands of characters"
    if any(letter in ran.err + ran.out for letter in "\0\x1b\x07"):
        yield "control characters in the output"


def _left(folder: Path, before: dict[str, str], ran: Ran, command: str) -> Iterator[str]:
    after = contents(folder)
    # A recipe makes its own outputs anew where its state says that they are old.
    may_change = (*STATES, "new") if command == "run recipe.yaml" else STATES
    touched = [
        name for name in before if after.get(name) != before[name] and name.split("/")[0] not in may_change
    ]
    if touched:
        yield f"changed {touched[0]}"
    new = sorted({name.split("/")[0] for name in after.keys() - before.keys()} - set(STATES))
    odd = [name for name in new if name not in OWN_NAMES and not (folder / name / transaction.NAME).is_file()]
    if odd:
        yield f"left {odd[0]} behind"
    if ran.status != 0 and set(new) & set(OWN_NAMES):
        yield f"failed, and wrote {new[0]}"
    if ran.status == 0 and (folder / "out").is_dir() and "--config-only" not in command:
        try:
            open_model(folder / "out").check()
        except Exception as error:
            yield f"a result that cannot be opened: {error!r}"
