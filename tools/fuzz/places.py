"""Every place in the JSON and the headers that cases damage, each kind of them as likely as the others.

`damage_json` meets a place that lies deep, or in a large file, once in some thousand rounds.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutations import TYPES, replaced
from tools.fuzz.cases import CASES, Case, copy_needed

LARGEST = 1 << 20
"""Bytes of JSON beyond which a file is left to `damage_json`: its places are one like the other."""

Step = str | int
"""A key, or a number in a list."""


@dataclass(frozen=True)
class Place:
    """A value in a file of a case.

    Attributes:
        case: whose commands read it.
        file: in the folder of a round.
        at: the way to the value.
    """

    case: Case
    file: Path
    at: tuple[Step, ...]

    def damage(self, _case: Case, folder: Path, rng: Random) -> list[str]:
        """Replace the value or leave it out; returns what was done."""
        path = folder / self.file
        value, rest = _read(path)
        path.write_bytes(_written(_changed(value, self.at, rng), rest))
        return [f"{self.file}: {'/'.join(map(str, self.at)) or 'all'}"]


def kinds_of_places(material: Path, work: Path, cases: Iterable[Case] = CASES) -> list[list[Place]]:
    """Those that are alike together: of one kind of case and name of file, all numbers on the way being one."""
    found: dict[tuple[str, str, str], list[Place]] = {}
    for case in cases:
        if case.processes > 1:  # too slow for so many rounds
            continue
        folder = work / "places"
        copy_needed(case, material, folder)
        for path in sorted({path for target in case.targets for path in folder.glob(target)}):
            if path.suffix in (".json", ".safetensors", ".partial") and path.is_file():
                for at in _ways(_read(path)[0]):
                    way = re.sub(r"\d+", "N", "/".join(map(str, at)))
                    place = Place(case, path.relative_to(folder), at)
                    found.setdefault((case.kind, path.name, way), []).append(place)
        shutil.rmtree(folder)
    return list(found.values())


def _ways(value: Any, at: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, held in inner:
        yield from _ways(held, (*at, step))


def _changed(value: Any, at: tuple[Step, ...], rng: Random) -> Any:
    if not at:
        return replaced(value, rng)
    made: Any = dict(value) if isinstance(value, dict) else list(value)
    if len(at) == 1 and rng.random() < 0.12:
        del made[at[0]]
    elif at[-1] == "dtype" and len(at) == 2 and rng.random() < 0.8:
        made[at[0]] = {**made[at[0]], "dtype": rng.choice(TYPES)}
    else:
        made[at[0]] = _changed(value[at[0]], at[1:], rng)
    return made


def _read(path: Path) -> tuple[Any, bytes | None]:
    """The JSON of a file; of safetensors that of its header, and what follows it. Of a file that holds none: None."""
    data = path.read_bytes()
    try:
        if path.suffix != ".safetensors":
            return (json.loads(data) if len(data) <= LARGEST else None), None
        end = 8 + int(struct.unpack("<Q", data[:8])[0])
        return json.loads(data[8:end]), data[end:]
    except ValueError:
        return None, None


def _written(value: Any, rest: bytes | None) -> bytes:
    text = json.dumps(value).encode()
    return text if rest is None else struct.pack("<Q", len(text)) + text + rest


def each_once(kinds: list[list[Place]], rng: Random) -> Iterator[Place]:
    """A place of every kind, the kinds in another order each time, without end."""
    while True:
        for places in rng.sample(kinds, len(kinds)):
            yield rng.choice(places)
