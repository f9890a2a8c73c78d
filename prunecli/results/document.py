"""The base of result files, which pydantic reads and checks; arrays of JSON numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prunecli.errors import DataError, PruneError, kind_and_reason
from prunecli.results.tabled import Tables, frame, scalars, stacked
from prunecli.tensors.json_files import check_format, read_json

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Self

LARGEST = 1e15
"""No figure of a result is larger; a chart of larger ones would overflow."""
MOST = 10**18
"""No count of a result is larger."""

Count = Annotated[int, Field(ge=0, le=MOST)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]


class Record(BaseModel):
    """Fields in the order in which they are written; what else a file holds is kept, and comes last."""

    model_config = ConfigDict(
        frozen=True,
        extra="allow",
        from_attributes=True,  # of the dataclasses that a run computes
        allow_inf_nan=False,
        populate_by_name=True,
        protected_namespaces=(),
    )

    def to_json(self) -> dict[str, Any]:
        """The fields that are there."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class Model(Record):
    """One of the header's models."""

    path: str = ""
    revision: str | None = None
    subfolder: str | None = None
    fingerprint: str | None = None
    model_type: str | None = None


class Document(Record):
    """A result file; its first fields are those of `results.header.header`.

    Attributes:
        FORMAT: "prunecli.NAME/VERSION".
        UPGRADES: format of an earlier version -> a function that returns the JSON in the present format.
        ERROR, REMEDY: the error that a damaged file raises, and what to do.
    """

    FORMAT: ClassVar[str]
    UPGRADES: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    ERROR: ClassVar[type[PruneError]] = DataError
    REMEDY: ClassVar[str] = ""

    format: str
    prunecli: str = ""
    command: list[str] = Field(default_factory=list)
    models: list[Model] = Field(default_factory=list)
    seed: int | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of this format, or of an earlier version.

        Raises:
            PruneError: (`ERROR`) the file is missing, damaged or of another format.
        """
        return cls.from_json(read_json(path, error=cls.ERROR), path)

    @classmethod
    def from_json(cls, payload: Any, path: Path) -> Self:
        """Check the JSON of a file of this format; `path` is for messages.

        Raises:
            PruneError: (`ERROR`) another format, or a field that is missing, misshapen or out of range.
        """
        upgrade = cls.UPGRADES.get(str(payload.get("format"))) if isinstance(payload, dict) else None
        if upgrade is None:
            check_format(path, payload, cls.FORMAT, cls.ERROR)
        try:
            return cls.model_validate(upgrade(payload) if upgrade else payload)
        except ValidationError as error:
            raise cls.ERROR(f"{path}: {first_fault(error)}", cls.REMEDY) from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise cls.ERROR(f"{path}: the file is damaged ({kind_and_reason(error)})", cls.REMEDY) from error

    def tables(self) -> Tables:
        """Name -> rows of each table of the file; tables without rows are left out.

        Raises:
            DataError: a field that a table needs is missing or misshapen.
        """
        try:
            return {name: rows for name, rows in self._tables().items() if rows}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{self.FORMAT}: the file is damaged ({kind_and_reason(error)})") from error

    def frame(self, table: str | None = None) -> pd.DataFrame:
        """A table, nothing rounded; counts are integers also where some are missing.

        Args:
            table: its name; None: all of them below one another, each row with the name of its table in the first
                column, `table`.

        Raises:
            DataError: the file has no such table.
        """
        tables = self.tables()
        if table is None:
            return stacked(tables)
        if table not in tables:
            raise DataError(f"no table {table!r} in {self.FORMAT}", f"It has {', '.join(tables)}.")
        return frame(tables[table])

    def _tables(self) -> Tables:
        """A table for each field that is a list of records, of their values that fill one cell."""
        fields = {name: value for name, value in self if name not in Document.model_fields}
        return {
            name: [scalars(record.to_json()) for record in value]
            for name, value in fields.items()
            if isinstance(value, list) and all(isinstance(record, Record) for record in value)
        }


Result = TypeVar("Result")


def with_fingerprints(document: Document, results: Sequence[Result]) -> list[tuple[Result, str]]:
    """Each result and the fingerprint of its checkpoint; "" if the header does not state one for each result."""
    stated = [model.fingerprint or "" for model in document.models]
    return list(zip(results, stated if len(stated) == len(results) else [""] * len(results), strict=True))


def first_fault(error: ValidationError) -> str:
    """Place and message of the first fault: `results.0.p_value: Input should be a valid number`."""
    fault = error.errors(include_url=False)[0]
    where = ".".join(map(str, fault["loc"]))
    said = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among values, NaN and those that are too large left out."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    }


def array_of(
    value: Any,
    shape: tuple[int, ...] | None = None,
    *,
    counts: bool = False,
    signed: bool = False,
    missing: bool = False,
) -> NDArray[Any]:
    """An array from JSON numbers; int64 for `counts`, else float64. It is no larger than a result may hold.

    Args:
        value: nested lists.
        shape: of the array; None: any.
        counts: refuse fractions.
        signed: allow negative numbers.
        missing: allow None, which becomes NaN.

    Raises:
        ValueError: what is wrong.
    """
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError("is not an array of numbers") from error
    known = array[~np.isnan(array)] if missing else array
    faults = {
        f"is of the shape {array.shape}; {shape} is needed": shape not in (None, array.shape),
        "holds NaN or infinity": not np.isfinite(known).all(),
        "holds numbers that no run gives": (np.abs(known) > (MOST if counts else LARGEST)).any(),
        "holds negative values": not signed and (known < 0).any(),
        "holds fractions; counts are whole": counts and (known != np.floor(known)).any(),
    }
    for fault, is_there in faults.items():
        if is_there:
            raise ValueError(fault)
    return np.asarray(value).astype(np.int64) if counts else array
