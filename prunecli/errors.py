"""What can go wrong in ways that a user can mend. The command line turns each into one or two plain lines."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REASON_LETTERS = 300
"""Most letters of another library's error that a message repeats."""


class PruneError(Exception):
    """A failure with a remedy.

    Attributes:
        message: one line: the file, the value, what is wrong with it.
        remedy: one line: what to do about it, or None where the message says it.
        exit_status: 1 for a failure the user can mend, 2 for bad usage.
    """

    exit_status = 1

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return self.message if self.remedy is None else f"{self.message}\n{self.remedy}"


class UsageError(PruneError):
    """Options that contradict each other or a value that no checkpoint could take."""

    exit_status = 2


class CheckpointError(PruneError):
    """A directory that is not a checkpoint, or one whose files are damaged."""


class UnsupportedModelError(CheckpointError):
    """A model family whose class says nothing, or one that a method cannot treat."""


class HubError(PruneError):
    """A model of the hub that cannot be had: no such one, no access, no network, or not what prunecli reads."""


class StatisticsError(PruneError):
    """A statistics file that is damaged, or that belongs to another model."""


class DataError(PruneError):
    """Text that cannot be used: missing, empty, misaligned, in an unknown language."""


class TextWarning(UserWarning):
    """Text that a model can hardly read."""


class OutputError(PruneError):
    """A result that cannot be written: it exists, or the disk is full."""


class MemoryShortError(PruneError):
    """A model that does not fit, refused before any of its weights is read.

    Attributes:
        need: the memory that the model needs (`modules.fitting.Need`), from which a command suggests what would fit.
    """

    def __init__(self, message: str, remedy: str, need: Any) -> None:
        super().__init__(message, remedy)
        self.need = need


def reason_of(error: BaseException) -> str:
    """Return the message of an error on one printable line, or the name of its type if it has no message.

    What stands in backquotes in messages of prunecli is an option, elsewhere not.
    """
    text = str(error) if isinstance(error, PruneError) else str(error).replace("`", "'")
    return " ".join(text.split())[:REASON_LETTERS] or type(error).__name__


def kind_and_reason(error: BaseException) -> str:
    """Return type and message of an error, as in `KeyError: 'a'`."""
    kind, reason = type(error).__name__, reason_of(error)
    return kind if reason == kind else f"{kind}: {reason}"


@contextmanager
def damaged(fault: str, remedy: str) -> Iterator[None]:
    """Inside, libraries read files, and raise anything, panics of Rust among it, which are no `Exception`.

    Raises:
        CheckpointError: `fault`, the reason and `remedy`, in the place of whatever the block raises.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if isinstance(error, PruneError) or not (is_panic or isinstance(error, Exception)):
            raise
        raise CheckpointError(f"{fault} ({kind_and_reason(error)})", remedy) from error


@contextmanager
def located(path: Path) -> Iterator[None]:
    """Errors of the block about a model begin with its path, unless they do already.

    Raises:
        CheckpointError: (and `UnsupportedModelError`) as the block.
    """
    try:
        yield
    except CheckpointError as error:
        if error.message.startswith(str(path)):
            raise
        raise type(error)(f"{path}: {error.message}", error.remedy) from error
