"""JSON documents: written whole or not at all."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prunecli.errors import OutputError, PruneError
from prunecli.tensors.transaction import new_file, refuse_output

_NUMBERS = re.compile(r"\[\n([^\[\]{}\"]*)\]")
"""A list of numbers on several lines: it goes on one. No text holds a line end, which JSON escapes."""
_OTHER_RESULTS = (".csv", ".md", ".tex", ".png", ".html", ".hyp", ".outputs.safetensors")


def write_json(
    path: Path | str, payload: Mapping[str, Any], *, force: bool = False, allow_nan: bool = False
) -> None:
    """Write `payload` beside `path`, then rename: the file appears whole or not at all.

    Args:
        path: the file.
        payload: what it is to hold.
        force: whether an existing file is replaced.
        allow_nan: whether NaN and infinity are written as Python writes them.

    Raises:
        OutputError: it exists and `force` is not given, or its directory does not.
        PruneError: a number is NaN or infinite and may not be, or a value has no form in JSON.
    """
    path = Path(path)
    refuse_output(path, "file", force=force)
    try:
        text = json.dumps(payload, indent=1, ensure_ascii=False, allow_nan=allow_nan, default=dict)
    except (TypeError, ValueError) as error:
        raise PruneError(f"{path}: not written: {error}") from error
    text = _NUMBERS.sub(lambda numbers: f"[{' '.join(numbers[1].split())}]", text) + "\n"
    with new_file(path) as partial:
        # Names of files may hold halves of surrogate pairs; Python escapes them as JSON does.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def refuse_unwritable(path: Path, *, force: bool) -> None:
    """For a command's beginning, so that long work does not end at an output that cannot be written.

    Raises:
        OutputError: `path` is a directory, exists and `force` is not given, is no file (a device, say) or no result
            of prunecli's, or lies in no directory, or in one that cannot be written to.
    """
    refuse_output(path, "file", force=force)
    if path.is_file() and not _is_replaceable(path):
        raise OutputError(
            f"{path}: no result of prunecli's; `force` replaces only those",
            "Choose another path, or remove it.",
        )


def _is_replaceable(path: Path) -> bool:
    """Whether a file may be an earlier result: it is no text, config or weights that a command reads.

    Of JSON that prunecli writes "format" comes first; tables, pictures and pages have endings of their own.
    """
    if path.name.lower().endswith(_OTHER_RESULTS):
        return True
    with path.open("rb") as file:
        start = file.read(200).strip()
    return not start or (start.startswith(b"{") and b'"format": "prunecli.' in start)


def partial_path(output: Path) -> Path:
    """Return the file that keeps the state of an unfinished run for the file `output`."""
    return output.with_name(f".{output.name}.partial")
