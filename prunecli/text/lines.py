"""The lines of a text file, and what every kind of text says of names and counts that cannot be."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from prunecli.errors import DataError, reason_of
from prunecli.tensors.git_lfs import refuse_pointer

PACKED = ".gz"
"""Ending of the names of files that are unpacked as they are read."""
SHOWN = 12
"""Names that a message lists at most."""
_ONE_A_LINE = "Name a file of text, one entry per line."


def read_lines(path: Path | str) -> tuple[str, ...]:
    r"""The lines of a UTF-8 file without their line ends (`\n` or `\r\n`) and without a byte order mark.

    A file whose name ends in `.gz` is unpacked.

    Raises:
        DataError: no such file, an empty one, a damaged one, a Git LFS pointer, or one that is not UTF-8 (with the
            line).
    """
    path = Path(path)
    refuse_pointer(path, DataError)
    try:
        data = path.read_bytes()
        if path.suffix == PACKED and data:
            data = gzip.decompress(data)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{path}: no such file", _ONE_A_LINE) from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: a directory, not a file", _ONE_A_LINE) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: not a whole gzip file ({reason_of(error)})", "Copy the file again."
        ) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}, line {line:,}: not UTF-8 (byte 0x{data[error.start]:02x})", "Convert the file to UTF-8."
        ) from error
    if not text.strip():
        raise DataError(f"{path}: the file is empty", "Name a file with text.")
    # Not splitlines(), which would also cut at U+2028, form feeds and the like, inside a sentence.
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return tuple(line.removesuffix("\r") for line in lines)


def near_names(name: str, known: Iterable[str], label: str = "Known") -> str:
    """What a message adds about an unknown `name`: the nearest of `known`, or, after `label`, a few of them."""
    names = sorted(set(known))
    near = get_close_matches(name, names, n=3, cutoff=0.8)
    near = near or [other for other in names if name and other.startswith(name)][:3]
    if near:
        return f"Did you mean {' or '.join(near)}?"
    shown = ", ".join(names[:SHOWN]) + (f", … ({len(names)} in all)" if len(names) > SHOWN else "")
    return f"{label}: {shown}." if names else f"{label}: none."


def require_count(count: int | None, present: int, what: str, source: str, holds: str = "it holds") -> None:
    """Refuse to take the first `count` of what is fewer; None asks for all.

    Raises:
        DataError: there are fewer.
    """
    if count is not None and count > present:
        raise DataError(
            f"{source}: {count:,} {what} were asked for, {holds} {present:,}",
            f"Ask for at most {present:,}.",
        )
