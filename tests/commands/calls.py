"""Calls of one command: what it printed, and how it ended."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from prunecli.commands.failures import describe
from tests.tiny import json_of


@dataclass(frozen=True)
class Result:
    status: int | None
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def shows(self, *texts: str) -> None:
        """Check that the tables and lines hold these texts."""
        assert [text for text in texts if text not in self.out] == [], self.out

    def says(self, *texts: str) -> None:
        """Check that the notes and errors hold these texts."""
        assert [text for text in texts if text not in self.err] == [], self.err


def call(command: Callable[..., None], *arguments: object) -> Result:
    """Text is split into words as in a shell, anything else is one; failures are described as the command line does."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    words = [word for one in arguments for word in (shlex.split(one) if isinstance(one, str) else [str(one)])]
    result = CliRunner().invoke(app, words)
    if result.exception is None or isinstance(result.exception, SystemExit):
        return Result(result.exit_code, result.stdout, result.stderr)
    text, status = describe(result.exception)
    return Result(status, result.stdout, result.stderr + text)


def done(command: Callable[..., None], *arguments: object) -> Result:
    """One that goes through."""
    result = call(command, *arguments)
    assert result.status == 0, result.err
    return result


def both(
    command: Callable[..., None], *arguments: object
) -> tuple[Callable[..., Result], Callable[..., Result]]:
    """`call` and `done` of one command, with arguments of all calls."""
    return partial(call, command, *arguments), partial(done, command, *arguments)


def refused(result: Result, message: str, status: int = 2) -> None:
    assert result.status == status, result.err
    assert message in result.err
    assert "Traceback" not in result.err
    if "Error: " in result.err:
        assert len(result.err[result.err.index("Error: ") :].splitlines()) <= 2


def refusals(*cases: tuple[Any, ...]) -> Any:
    """Cases of calls that are refused: the end of the line, the message, and the status if it is not 2.

    The test gets `refusal`, which calls a command with arguments before the end.
    """

    def check(case: tuple[Any, ...]) -> Callable[..., None]:
        end, *said = case
        return lambda command, *before: refused(command(*before, end), *said)

    return pytest.mark.parametrize("refusal", map(check, cases), ids=[case[1] for case in cases])


def content(path: Path | str) -> dict[str, Any]:
    """A written result, but for the command line that made it."""
    found = json_of(path)
    found.pop("command", None)
    return found


def names(directory: Path | str = ".") -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())
