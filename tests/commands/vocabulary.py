"""Calls of `prunecli trim-vocabulary`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer
from typer.testing import CliRunner

from prunecli.commands.app import describe
from prunecli.commands.trim_vocabulary import trim_vocabulary


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


def run(*arguments: object) -> Result:
    """One call of the command; failures are described as the command line does."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(trim_vocabulary)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is None or isinstance(result.exception, SystemExit):
        return Result(result.exit_code, result.stdout, result.stderr)
    text, status = describe(result.exception)
    return Result(status, result.stdout, result.stderr + text)


def trimmed(source: Path, output: Path, lines: tuple[str, ...], *options: object) -> Path:
    """Trim `source` to `lines`; returns `output`."""
    file = output.parent / "lines"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    result = run(source, "--text", file, "-o", output, *options)
    assert result.status == 0, result.err
    file.unlink()
    return output
