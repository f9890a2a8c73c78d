"""The bundled programs are those that the generator makes, and print what stands behind them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prunecli.demo import DATA, LM_DATA, LM_TEXTS
from tools.demo.programs import HELD_OUT, PROSE, main, programs

STATEMENT = re.compile(
    r"let (?P<new>\w+) = (?P<digit>\d);|(?P<name>\w+) = (?P=name) (?P<sign>[-+*]) (?P<by>\d);"
    r"|if \((?P<left>\w+) > (?P<right>\w+)\) \{ (?P=left) = (?P<then>\d); \}|print\((?P<shown>\w+)\); // (?P<said>\d)"
)


def prints_what_it_says(program: str) -> bool:
    """Whether the whole line is statements, and every number behind a `print` is the variable's."""
    values: dict[str, int] = {}
    position = 0
    while position < len(program):
        found = STATEMENT.match(program, position)
        if found is None:
            return False
        if found["new"]:
            values[found["new"]] = int(found["digit"])
        elif found["name"]:
            values[found["name"]] = eval(f"{values[found['name']]} {found['sign']} {found['by']}") % 10
        elif found["left"]:
            if values[found["left"]] > values[found["right"]]:
                values[found["left"]] = int(found["then"])
        elif values[found["shown"]] != int(found["said"]):
            return False
        position = found.end() + 1
    return True


def test_the_bundled_text_is_made_again_byte_for_byte(tmp_path: Path) -> None:
    main(tmp_path)
    names = {f"{split}.{name}" for split in HELD_OUT for name in LM_TEXTS}
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in LM_DATA.iterdir()} == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (LM_DATA / name).read_bytes()
    assert (LM_DATA / "val.prose").read_bytes() == (DATA / f"val.{PROSE}").read_bytes()


def test_programs_are_no_two_alike_and_print_what_they_say() -> None:
    text = programs(300)
    lines = [line for split in text.values() for line in split]
    assert len(set(lines)) == len(lines) == 700
    assert all(map(prints_what_it_says, lines))
    wrong = text["test"][0][:-1] + str((int(text["test"][0][-1]) + 1) % 10)
    assert not prints_what_it_says(wrong)


@pytest.mark.parametrize("count", [0, 5])
def test_the_held_out_text_does_not_depend_on_how_much_is_trained_on(count: int) -> None:
    assert programs(count)["test"] == programs(20)["test"]
    assert programs(count)["train"] == programs(20)["train"][:count]
