"""Small programs, the second domain of the demo's language model: `python -m tools.demo.programs DIR` writes its text.

A program is one line: numbers modulo 10 are put into variables and changed, and what is printed stands behind it.
The first domain is prose: the sentences of one of the six artificial languages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from prunecli.demo import DATA
from tools.demo.languages import SEED, pick

PROSE = "qba_Latn"
HELD_OUT = {"test": 200, "val": 200}
TRAIN = 6_000
VARIABLES = ("a", "b", "c", "total", "count")
OPERATORS = ("+", "-", "*")
STATEMENTS = range(3, 7)
"""Of a program, the printing ones not counted."""


def _changed(value: int, operator: str, by: int) -> int:
    return {"+": value + by, "-": value - by, "*": value * by}[operator] % 10


def draw_program(rng: Random) -> str:
    """A program; every `print(x)` is followed by what it prints."""
    values: dict[str, int] = {}
    written: list[str] = []
    for _ in range(pick(rng, STATEMENTS)):
        name, digit = pick(rng, VARIABLES), pick(rng, range(10))
        operator, kind = pick(rng, OPERATORS), rng.random()
        if name not in values:
            values[name] = digit
            written.append(f"let {name} = {digit};")
        elif kind < 0.4:
            values[name] = _changed(values[name], operator, digit)
            written.append(f"{name} = {name} {operator} {digit};")
        elif kind < 0.7:
            other = pick(rng, tuple(values))
            if values[name] > values[other]:
                values[name] = digit
            written.append(f"if ({name} > {other}) {{ {name} = {digit}; }}")
        else:
            written.append(f"print({name}); // {values[name]}")
    shown = pick(rng, tuple(values))
    return " ".join([*written, f"print({shown}); // {values[shown]}"])


def programs(train: int = TRAIN) -> dict[str, list[str]]:
    """Every split's programs, the first `train` of train; none is in two."""
    rng, seen = Random(f"{SEED} programs"), set[str]()
    text: dict[str, list[str]] = {}
    for split, count in {**HELD_OUT, "train": train}.items():
        text[split] = []
        while len(text[split]) < count:
            program = draw_program(rng)
            if program not in seen:
                seen.add(program)
                text[split].append(program)
    return text


def main(directory: Path) -> None:
    """Write `SPLIT.code` and `SPLIT.prose` of the held-out splits into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    text = programs(0)
    for split in HELD_OUT:
        (directory / f"{split}.code").write_bytes("".join(f"{line}\n" for line in text[split]).encode())
        (directory / f"{split}.prose").write_bytes((DATA / f"{split}.{PROSE}").read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
