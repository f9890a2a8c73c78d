"""Calls of `prunecli trim-vocabulary`."""

from collections.abc import Sequence
from pathlib import Path

from prunecli.commands.prune import trim_vocabulary
from tests.commands.calls import both

run, done = both(trim_vocabulary)


def trimmed(source: Path, output: Path, lines: Sequence[str], *options: object) -> Path:
    """Trim `source` to `lines`; returns `output`."""
    file = output.parent / "lines"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    done(source, "--text", file, "-o", output, *options)
    file.unlink()
    return output
