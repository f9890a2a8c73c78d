"""The base of result files: their header, pydantic models with arrays of JSON numbers, and their tables.

A table is a list of rows; a row maps a column's name, with its unit where it has one, to a value of the file. pandas is
imported only when it is called.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from string import Formatter
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prunecli import __version__
from prunecli.errors import DataError, PruneError, StatisticsError, UsageError, kind_and_reason
from prunecli.model.checkpoint import Checkpoint
from prunecli.processes import COMMAND
from prunecli.tensors.hub.names import origin
from prunecli.tensors.json_files import read_json
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.transaction import new_file, refuse_unwritable, write_json

if TYPE_CHECKING:
    import pandas as pd


Json = dict[str, Any]
"""A JSON object."""
_SECRET = re.compile(r"(?<=://)[^/@\s]+(?=@)|\bhf_\w{8,}")
"""A user's name and password in an address; a token of the hub."""


def sizes(checkpoint: Checkpoint) -> Json:
    """The fields of a result that say how big a checkpoint is."""
    return {"parameters": checkpoint.total_parameters, "checkpoint_bytes": checkpoint.total_bytes}


Row = Json
"""Column's name -> value."""
Cells = dict[str, str | None]
"""Heading of a shown table -> text of the cell; None: no value."""
Tables = dict[str, list[Row]]
"""Table's name -> its rows; a row lacks the columns that do not concern it."""


@dataclass(frozen=True)
class Shown:
    """A table of texts that the terminal and the report page show.

    Attributes:
        title: title of the table.
        rows: column's name -> text of the cell. None, or no entry: no value.
        text_columns: number of the first columns, which hold text and names; the others hold values.
        keys: number of the first columns, which a narrow terminal repeats in each part of the table.
    """

    title: str
    rows: Sequence[Mapping[str, str | None]]
    text_columns: int = 1
    keys: int = 1

    @classmethod
    def of(
        cls,
        title: str,
        rows: Sequence[Mapping[str, Any]],
        columns: Mapping[str, str] | None = None,
        text_columns: int = 1,
        keys: int = 1,
    ) -> Shown:
        """A table whose cells show values of `rows`.

        Args:
            columns: heading -> text of the cell with names of values in braces, such as "{parameters!m}" or
                "{lowest:.1%} to {highest:.1%}". Without one of the values, the row has no such cell. If None, `rows`
                hold the texts of the cells.
        """
        cells = _Cells()
        if columns is not None:
            rows = [{heading: cells.fill(form, row) for heading, form in columns.items()} for row in rows]
        return cls(title, rows, text_columns, keys)

    @cached_property
    def columns(self) -> list[str]:
        """The first column, and those in which a row has a value."""
        names = dict.fromkeys(chain(*self.rows))
        first = next(iter(names), None)
        return [
            name for name in names if name == first or any(row.get(name) is not None for row in self.rows)
        ]

    @property
    def texts(self) -> int:
        """Number of the shown columns that hold text."""
        names = [*dict.fromkeys(chain(*self.rows))]
        return sum(name in self.columns for name in names[: self.text_columns])


Blocks = Iterator[Shown | str]
"""The tables and lines that the terminal shows."""


class _Cells(Formatter):
    """Fills forms of cells as `str.format` does; `!b` is a number of bytes, `!m` millions, `!n` `number_text`."""

    def fill(self, form: str, row: Mapping[str, Any]) -> str | None:
        """The form with values of a row; None if one is missing or None."""
        try:
            return self.vformat(form, (), known(row))
        except KeyError:
            return None

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """See `string.Formatter`."""
        units = {"b": bytes_text, "m": millions, "n": number_text}
        return units[conversion](value) if conversion else value


def maybe(form: str | Callable[[Any], str], value: Any) -> str | None:
    """Format a value that may be None: by a function, or by a text such as "{:.3f}"."""
    if value is None:
        return None
    return form.format(value) if isinstance(form, str) else form(value)


def millions(parameters: int) -> str:
    """A number of parameters in millions: 2430000 -> "2.43M"."""
    return f"{parameters / 1e6:,.2f}M"


def number_text(value: float) -> str:
    """A value with four digits; a whole number with all of them."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def known(values: Mapping[str, Any]) -> Row:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def scalars(values: Json) -> Row:
    """The values that fill one cell: no lists, no objects."""
    return {name: value for name, value in values.items() if not isinstance(value, Mapping | list | tuple)}


def cells(values: Json) -> Row:
    """The values, with the length of a list in its place."""
    return {name: len(value) if isinstance(value, list | tuple) else value for name, value in values.items()}


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """A row for each of `rows`, a column for each name, in the order in which names come up."""
    import pandas as pd

    made = pd.DataFrame(rows, dtype=object)
    made = made.where(made.notna(), None)
    for name in made:
        with suppress(OverflowError):  # whole numbers that no run gives stay as they are
            made[name] = made[name].astype(_dtype(made[name]))
    return made


def stacked(tables: Tables) -> pd.DataFrame:
    """All tables below one another; the first column, `table`, has their names."""
    return frame([{"table": name, **row} for name, rows in tables.items() for row in rows])


def _dtype(values: pd.Series) -> str:
    """Integers stay integers where some are missing."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int}:
        return "Int64"
    if kinds == {bool}:
        return "boolean"
    return "float64" if kinds and kinds <= {int, float} else "object"


def refuse_table(path: Path, *, force: bool) -> None:
    """Refuse a table that could not be written in the end.

    Raises:
        UsageError: its ending is not that of a form.
        OutputError: it exists and `force` is not given, is a directory, or lies in none.
    """
    if path.suffix.lower() not in (".csv", ".md", ".tex"):
        raise UsageError(
            f"`table={path}`: tables are written as CSV, Markdown or LaTeX",
            "Choose a name that ends in .csv, .md or .tex.",
        )
    refuse_unwritable(path, force=force)


def write_tables(path: Path, tables: Tables, *, force: bool = False) -> None:
    """Write tables in the form that the name's ending says, whole or not at all.

    CSV is one table, whose first column, `table`, has the name of each row's; Markdown has a heading, LaTeX a comment
    before each.

    Raises:
        UsageError, OutputError: as `refuse_table`.
    """
    refuse_table(path, force=force)
    form = path.suffix.lower()
    if form == ".csv":
        text = str(stacked(tables).to_csv(index=False, lineterminator="\n"))
    else:
        head, one = ("## {}\n", _markdown) if form == ".md" else ("% {}", _latex)
        text = "\n".join(f"{head.format(name)}\n{one(frame(rows))}" for name, rows in tables.items())
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="")


def _markdown(made: pd.DataFrame) -> str:
    """pandas' own needs another package."""
    rule = ["---" if made[name].dtype == object else "---:" for name in made]
    cells = [made.columns, *_texts(made).itertuples(index=False)]
    head, *rows = [[" ".join(text.replace("|", "\\|").split()) for text in row] for row in cells]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def _latex(made: pd.DataFrame) -> str:
    """For a document that uses booktabs."""
    numbers = "".join("l" if made[name].dtype == object else "r" for name in made)
    return str(_texts(made).to_latex(index=False, escape=True, column_format=numbers))


def _texts(made: pd.DataFrame) -> pd.DataFrame:
    """The cells as text, "" where a value is missing."""
    return made.astype(object).where(made.notna(), "").map(str)


LARGEST = 1e15
"""No figure of a result is larger; a chart of larger ones would overflow."""
MOST = 10**18
"""No count of a result is larger."""

Count = Annotated[int, Field(ge=0, le=MOST)]
Total = Annotated[int, Field(ge=1, le=MOST)]
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

    def to_json(self) -> Json:
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
    """A result file; its first fields are those of `header`.

    Attributes:
        FORMAT: "prunecli.NAME/VERSION".
        UPGRADES: format of an earlier version -> a function that returns the JSON in the present format.
        ERROR, REMEDY: the error that a damaged file raises, and what to do.
    """

    FORMAT: ClassVar[str]
    UPGRADES: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    ERROR: ClassVar[type[PruneError]] = DataError
    REMEDY: ClassVar[str] = ""
    EMPTY: ClassVar[tuple[Any, ...]] = ()
    """Values of fields that are left out of the JSON, but for the seed."""

    format: str
    prunecli: str = ""
    command: list[str] = []
    models: list[Model] = []
    seed: int | None = None

    @classmethod
    def header(cls, checkpoints: Iterable[Checkpoint], seed: int | None = None) -> Json:
        """The fields that every document begins with.

        Args:
            checkpoints: the models that it speaks of.
            seed: of everything random, or None where nothing is.
        """
        return {
            "format": cls.FORMAT,
            "prunecli": __version__,
            "command": [_SECRET.sub("***", word) for word in COMMAND.get()],
            "models": [
                {
                    **origin(made.path),
                    **({"fingerprint": made.fingerprint} if made.is_local else {}),
                    "model_type": made.model_type,
                }
                for made in checkpoints
            ],
            "seed": seed,
        }

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
        stated = payload.get("format") if isinstance(payload, dict) else None
        upgrade = cls.UPGRADES.get(str(stated))
        if upgrade is None and stated != cls.FORMAT:
            what = f'has the format "{stated}"' if stated is not None else "has no format"
            raise cls.ERROR(
                f'{path}: {what}, this prunecli reads "{cls.FORMAT}"',
                "Give a file of the right kind, or use the prunecli that made it.",
            )
        try:
            return cls.model_validate(upgrade(payload) if upgrade else payload)
        except ValidationError as error:
            raise cls.ERROR(f"{path}: {first_fault(error)}", cls.REMEDY) from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise cls.ERROR(f"{path}: the file is damaged ({kind_and_reason(error)})", cls.REMEDY) from error

    def to_json(self) -> Json:
        """The fields that are there, but `EMPTY` ones."""
        fields = super().to_json()
        return {name: value for name, value in fields.items() if name == "seed" or value not in self.EMPTY}

    def write(self, path: Path, *, force: bool) -> None:
        """Write the file, whole or not at all; `force` replaces one that is there."""
        write_json(path, self.to_json(), force=force)

    @property
    def about(self) -> str:
        """One line on how the result was made; "" if its tables say it."""
        return ""

    @property
    def summed_up(self) -> tuple[str, ...]:
        """Names of the tables that are too long to be listed."""
        return ()

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


class Statistics(Document):
    """Sums over a text, of which those of several runs of one model add up.

    Attributes:
        ALIKE: attributes that must be equal in all parts that are merged.
        APART: what to do if they differ.
        split: split of a directory of parallel text.
        whole_files: each file of plain text was one document, or each line was; None: unknown, or of both kinds.
        mixed: statistics of whole documents and of single lines were merged.
    """

    ERROR = StatisticsError
    ALIKE: ClassVar[tuple[str, ...]]
    APART: ClassVar[str]

    split: str | None = None
    whole_files: bool | None = None
    mixed: bool = Field(default=False, exclude=True)

    @classmethod
    def merged(cls, parts: Sequence[Self], names: Sequence[str]) -> Self:
        """One from several of one model, such that nothing is lost.

        Args:
            parts: at least one.
            names: names of the parts for messages.

        Raises:
            StatisticsError: an attribute of `ALIKE` differs, or they do not add up.
        """
        first = parts[0]
        if len(parts) == 1:
            return first
        for name, part in zip(names, parts, strict=True):
            for attribute in cls.ALIKE:
                if getattr(first, attribute) != getattr(part, attribute):
                    one, other = (shorten(repr(getattr(own, attribute)), 40) for own in (first, part))
                    raise StatisticsError(
                        f"{names[0]} and {name} cannot be merged: {attribute} is {one} and {other}.",
                        cls.APART,
                    )
        forms = {part.whole_files for part in parts}
        common = {
            "split": " and ".join(dict.fromkeys(part.split for part in parts if part.split)) or None,
            "whole_files": first.whole_files if len(forms) == 1 else None,
            "mixed": {True, False} <= forms,
        }
        return first.model_copy(update={**common, **first.sums(parts)})

    @abstractmethod
    def sums(self, parts: Sequence[Self]) -> Json:
        """The fields that add up, of all parts together; this is the first of them."""


def first_fault(error: ValidationError) -> str:
    """Place and message of the first fault: `results.0.p_value: Input should be a valid number`."""
    fault = error.errors(include_url=False)[0]
    where = ".".join(map(str, fault["loc"]))
    said = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said


def numbers(values: Json) -> dict[str, float]:
    """The numbers among values, NaN and those that are too large left out."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    }


def check_matrix(matrix: Sequence[Sequence[Any]], rows: Sequence[Any], columns: Sequence[Any]) -> None:
    """Refuse a matrix of similarities without a row for each of `rows` and a column for each of `columns`.

    Raises:
        ValueError: another number of rows or columns.
    """
    if len(matrix) != len(rows) or any(len(row) != len(columns) for row in matrix):
        raise ValueError("a matrix of similarities has not a row and a column for each member")


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
