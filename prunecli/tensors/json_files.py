"""JSON, read strictly (`read_json`, `read_object`, `parsed`), or so that damage counts as absence (`lenient`)."""

import json
import re
import struct
from collections.abc import Callable, Collection
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prunecli.errors import CheckpointError, PruneError, StatisticsError

BEGINNING = b"version https://git-lfs"
GENERATION = "generation_config.json"
BESIDE_WEIGHTS = (
    "*token*.json", "vocab*", "merges.txt", "*.model", "*.spm", "*.tiktoken",
    "*processor*.json", GENERATION,
)  # fmt: skip
"""Files of a checkpoint directory that its model does not work without, weights and config.json apart."""
LONGEST = 1024
"""Bytes: a pointer is shorter, by Git LFS's own specification."""


def refuse_pointer(path: Path, error: type[PruneError] = CheckpointError) -> None:
    """For a reader's beginning, so that a pointer is not called damaged; a file that cannot be read is left to it.

    Raises:
        CheckpointError: (or `error`) the file is a Git LFS pointer.
    """
    try:
        with path.open("rb") as file:
            start = file.read(LONGEST)
    except OSError:
        return
    if start.startswith(BEGINNING) and len(start) < LONGEST:
        raise error(f"{path}: a Git LFS pointer, not the file", "Run `git lfs pull` in its directory.")


def refuse_pointers_beside_weights(directory: Path) -> None:
    """For whoever loads or copies them.

    Raises:
        CheckpointError: tokenizer, processor or generation config is a Git LFS pointer.
    """
    for path in sorted({file for pattern in BESIDE_WEIGHTS for file in directory.glob(pattern)}):
        refuse_pointer(path)


LONE = "half a surrogate pair"
DEEPEST = 100
"""Levels of a config.json; real ones have five or so."""
HALF = re.compile("[\ud800-\udfff]")

P = ParamSpec("P")
T = TypeVar("T")


def read_bytes(path: Path, error: type[PruneError], remedy: str | None = None) -> bytes:
    """The content of a file.

    Raises:
        PruneError: (`error`) the file is missing, a directory, or a Git LFS pointer.
    """
    refuse_pointer(path, error)
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as fault:
        raise error(f"{path}: no such file", remedy) from fault
    except IsADirectoryError as fault:
        raise error(f"{path}: a directory, not a file", remedy) from fault


def read_json(
    path: Path | str,
    *,
    error: type[PruneError] = StatisticsError,
    unique: bool = False,
    finite: bool = True,
) -> Any:
    """Read a document.

    Args:
        path: the file.
        error: what to raise.
        unique: no object may have a key twice.
        finite: no number may be NaN or infinite.

    Raises:
        StatisticsError: (or `error`) the file is missing, empty, cut short, a Git LFS pointer, or holds NaN.
    """
    path = Path(path)
    remedy = "Copy the file again." if issubclass(error, CheckpointError) else "Make it again."
    try:
        text = read_bytes(path, error).decode()
    except UnicodeDecodeError as fault:
        raise error(f"{path}: not a JSON file ({fault.reason} at byte {fault.start})") from fault
    if not text.strip():
        raise error(f"{path}: an empty file", remedy)
    try:
        return parsed(text, unique=unique, parse_constant=_refuse_constant if finite else None)
    except json.JSONDecodeError as fault:
        cut = fault.pos >= len(text.rstrip()) - 1 or "Unterminated" in fault.msg
        raise error(
            f"{path}: {'cut short' if cut else 'not JSON'} at line {fault.lineno} ({fault.msg})", remedy
        ) from fault
    except ValueError as fault:
        raise error(f"{path}: {fault}", remedy) from fault


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint: an object in which no key occurs twice; a number may be NaN or infinite.

    Raises:
        CheckpointError: as `read_json`; or it holds something else.
    """
    value = read_json(path, error=CheckpointError, unique=True, finite=False)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object", "Copy the file again.")
    return value


def parsed(text: str | bytes, *, unique: bool = False, **options: Any) -> Any:
    """The value of a JSON text; bytes are UTF-8.

    Args:
        unique: no object may have a key twice.
        options: as `json.loads` takes them.

    Raises:
        ValueError: whatever is wrong with it.
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys if unique else None, **options)
        if ("\\ud" in text or "\\uD" in text) and has_lone_surrogates(value):
            raise ValueError(f"holds text that no file could ({LONE})")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def lenient(read: Callable[P, T]) -> Callable[P, T | None]:
    """`read`, but None in place of whatever a file raises that is missing, damaged or of another form."""

    @wraps(read)
    def reading(*arguments: P.args, **options: P.kwargs) -> T | None:
        try:
            return read(*arguments, **options)
        except (
            PruneError,
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            struct.error,
        ):
            return None

    return reading


def has_lone_surrogates(value: Any) -> bool:
    """Whether any text in a JSON value, names included, could not be written as UTF-8.

    What JSON does not know counts as it is printed, or as a name not at all.
    """
    text = json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    return HALF.search(text) is not None


def is_finite(value: Any, but: Collection[str] = (), levels: int = DEEPEST) -> bool:
    """Return whether no number of a JSON value is NaN or infinite, and no part lies deeper than `levels`.

    Python reads `NaN`, `Infinity` and `1e999`, which JSON does not have; values too deep cannot be compared or copied.

    Args:
        but: keys whose values may be anything.
    """
    if isinstance(value, dict):
        value = [item for key, item in value.items() if key not in but]
    if isinstance(value, list):
        return levels > 0 and all(is_finite(item, but, levels - 1) for item in value)
    return not isinstance(value, float) or isfinite(value)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"holds {name}, which is no number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=…)`."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return value
