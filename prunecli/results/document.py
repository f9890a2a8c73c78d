"""What result files that pydantic reads and checks have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prunecli.errors import DataError
from prunecli.results.arrays import LARGEST, MOST
from prunecli.results.tabled import Tabled, Tables, scalars

if TYPE_CHECKING:
    from typing_extensions import Self

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


class Document(Record, Tabled):
    """A result file; its first fields are those of `results.header.header`."""

    format: str
    prunecli: str = ""
    command: list[str] = Field(default_factory=list)
    models: list[Model] = Field(default_factory=list)
    seed: int | None = None

    @classmethod
    def from_json(cls, payload: Any, path: Path) -> Self:
        try:
            return cls.model_validate(payload)
        except ValidationError as error:
            raise DataError(f"{path}: {first_fault(error)}") from error

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
    """What is wrong first, after where it is: `results.0.p_value: Input should be a valid number`."""
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
