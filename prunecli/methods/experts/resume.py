"""The state of an interrupted `collect-gates`, in hidden files beside its output."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prunecli.errors import PruneError
from prunecli.methods.experts.score import State
from prunecli.processes import ALONE, ProcessGroup, undisturbed
from prunecli.progress import Say, unsaid
from prunecli.results.gates import COUNTS, GateSums
from prunecli.running.layerwise.states import Snapshots, own_header
from prunecli.running.runner import ignored
from prunecli.tensors.documents import layers_path, partial_path, write_json
from prunecli.tensors.json_files import lenient, read_json

SAVE_EVERY_S = 20.0


@dataclass(frozen=True)
class PartialRun:
    """What a run that is not finished keeps beside its output.

    Attributes:
        output: of the run; None: nothing is kept.
        key: everything that the sums depend on: what a run with another one left is not gone on from.
        process_group: the first process writes the sums, each its batches' states.
        say: hears of what is gone on from, and what is kept.
    """

    output: Path | None
    key: Mapping[str, Any]
    process_group: ProcessGroup = ALONE
    say: Say = unsaid

    def dtype(self) -> str | None:
        """The type that the run which is gone on from computed in; `key` is without it, under "compute"."""
        return None if self.output is None else _kept_dtype(partial_path(self.output), self.key)

    @contextmanager
    def kept(self) -> Iterator[tuple[State, Callable[[State], None]]]:
        """What an interrupted run left, and what takes the state; if this one ends early, what it leaves is kept."""
        if self.output is None:
            yield State(), ignored
            return
        path = partial_path(self.output)
        saver = Saver(path, self.key)
        state = self.process_group.broadcast(read_state(path, self.key))
        if state.batches:
            self.say(f"Going on from {path}: {state.batches} batches are done.")
        if not self.process_group.is_main:
            yield state, ignored
            return
        try:
            yield state, saver
        except (KeyboardInterrupt, SystemExit, PruneError):
            with undisturbed():  # torchrun may end this process while it does what another's end makes it do
                saver.write()
                layers = own_layers_path(self.output, self.process_group)
                if kept := [str(file) for file in (path, layers) if file.exists()]:
                    self.say(f"Kept in {' and '.join(kept)}: the same command goes on from it.")
            raise

    def snapshots(self, state: State) -> Snapshots | None:
        """Where a run layer by layer keeps its batches' states; says what becomes of those that one left."""
        if self.output is None:
            return None
        path = own_layers_path(self.output, self.process_group)
        snapshots = Snapshots(path, self.key, process_group=self.process_group, say=self.say)
        if (size := snapshots.group_size(state.batches)) is not None:
            self.say(f"Going on from {path}: {size} batches are part of the way through.")
        elif other := next(
            (other for other in layers_paths(self.output) if own_header(other, self.key, state.batches)), None
        ):
            self.say(
                f"{other} is of a run with another number of processes, or lacks what goes with it: "
                "these batches begin again at the first layer."
            )
        return snapshots


def own_layers_path(output: Path, process_group: ProcessGroup = ALONE) -> Path:
    """Where a process of a run by layers keeps its batches' states for the result `output`."""
    alone = process_group.world_size == 1
    return layers_path(output, "" if alone else f".{process_group.rank}of{process_group.world_size}")


def layers_paths(output: Path) -> list[Path]:
    """What runs by layers have left beside `output` here, with however many processes."""
    name = layers_path(output).name
    return sorted(path for path in output.parent.iterdir() if path.name.startswith(name))


def read_state(path: Path, key: Mapping[str, Any]) -> State:
    """The state that a run with the same `key` left in `path`; an empty one where there is none."""
    return _read_state(path, key) or State()


@lenient
def _read_state(path: Path, key: Mapping[str, Any]) -> State | None:
    content = read_json(path)
    if content["key"] != json.loads(json.dumps(key)) or content["sha256"] != _sha256(content):
        return None
    sums = {
        tuple(entry): GateSums(
            **{
                name: np.array(values, np.int64 if name in COUNTS else np.float64)
                for name, values in arrays.items()
            }
        )
        for *entry, arrays in content["sums"]
    }
    return State(int(content["batches"]), sums)


@lenient
def _kept_dtype(path: Path, key: Mapping[str, Any]) -> str | None:
    """The type that the run which left `path` computed in, if its key was `key` (without that: "compute")."""
    found = read_json(path)["key"]
    compute = str(found.pop("compute"))
    return compute if found == json.loads(json.dumps(key)) else None


def write_state(path: Path, key: Mapping[str, Any], state: State) -> None:
    """Replace the file at once; floats are written so that they read back to the last bit."""
    sums = [
        [*entry, {name: getattr(sums, name).tolist() for name in sums.names}]
        for entry, sums in state.sums.items()
    ]
    content = {"batches": state.batches, "sums": sums}
    write_json(path, {"key": dict(key), **content, "sha256": _sha256(content)}, force=True)


def _sha256(content: Mapping[str, Any]) -> str:
    """Of what is counted: a damaged number would be counted on from without a word."""
    counted = json.dumps([content["batches"], content["sums"]])
    return hashlib.sha256(counted.encode()).hexdigest()


class Saver:
    """Writes the state now and then; `last` is what an interrupt should write."""

    def __init__(
        self, path: Path, key: Mapping[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.last: State | None = None
        self._path, self._key, self._clock = path, key, clock
        self._written = clock()

    def __call__(self, state: State) -> None:
        self.last = state
        if self._clock() - self._written >= SAVE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Write the last state, if there is one."""
        if self.last is not None:
            with undisturbed():
                write_state(self._path, self._key, self.last)
            self._written = self._clock()
