"""A result file appears whole or not at all: it is written beside its place and renamed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prunecli.errors import OutputError
from prunecli.tensors.transaction import output_error, partial_name, sweep


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A hidden name beside `path` to write to; it becomes `path` when the block ends well.

    Whatever ends the block early removes it and leaves `path` as it was. What a SIGKILL left behind goes when the same
    file is written the next time.

    Raises:
        OutputError: its directory does not exist, or the file cannot be written.
    """
    partial = partial_name(path)
    try:
        sweep(path)
        yield partial
        partial.replace(path)
    except FileNotFoundError as error:
        if path.parent.is_dir():
            raise output_error(path, error) from error
        raise OutputError(
            f"{path.parent}: no such directory", "Create it, or choose another output."
        ) from None
    except OSError as error:
        raise output_error(path, error) from error
    finally:
        with suppress(OSError):  # such as a name that is too long: then it was not made either
            partial.unlink(missing_ok=True)
