"""Result files, read and checked, as pandas frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.errors import DataError
from prunecli.tensors.documents import read_json

if TYPE_CHECKING:
    import pandas as pd

    from prunecli.results.tables.rows import Tables


@dataclass(frozen=True)
class Result:
    """A result file of prunecli's.

    Attributes:
        format: "prunecli.NAME/VERSION".
        payload: everything that the file holds.
    """

    format: str
    payload: Mapping[str, Any]

    def tables(self) -> Tables:
        """Name -> rows of each table of the file, as plain records.

        Raises:
            DataError: a field that a table needs is missing or misshapen.
        """
        from prunecli.results.tables import tables_of

        try:
            return tables_of(self.payload)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{self.format}: the file is damaged ({type(error).__name__}: {error})"
            ) from error

    def frame(self, table: str | None = None) -> pd.DataFrame:
        """A table, nothing rounded; counts are integers also where some are missing.

        Args:
            table: its name; None: all of them below one another, each row with the name of its table in the first
                column, `table`.

        Raises:
            DataError: the file has no such table.
        """
        from prunecli.results.frames import frame, stacked

        tables = self.tables()
        if table is None:
            return stacked(tables)
        if table not in tables:
            raise DataError(f"no table {table!r} in {self.format}", f"It has {', '.join(tables)}.")
        return frame(tables[table])


def read(path: Path | str) -> Result:
    """Read evaluation.json, latency.json, similarity.json, languages.json, heads.json, gates.json, a training's log, or
    what `inspect --json` printed.

    Raises:
        DataError: missing, cut short, not a result of this version, or with fields that no run writes.
    """
    from prunecli.results.schemas import SCHEMAS

    path = Path(path)
    payload = read_json(path, error=DataError)
    format_ = payload.get("format") if isinstance(payload, dict) else None
    if not isinstance(format_, str):
        raise DataError(
            f"{path}: no result of prunecli's", "Give a JSON file that one of its commands wrote."
        )
    if format_ not in SCHEMAS:
        known = {one.rpartition("/")[0]: one for one in SCHEMAS}
        read_json(
            path, known.get(format_.rpartition("/")[0], format_), error=DataError
        )  # raises: another version
        raise DataError(
            f'{path}: files of the format "{format_}" hold no tables', f"Those are {', '.join(SCHEMAS)}."
        )
    checked(path, format_, payload)
    return Result(format_, payload)


def checked(path: Path, format: str, payload: Any) -> Any:  # noqa: A002 (the key's name)
    """The fields of a file as its schema reads them.

    Raises:
        DataError: one that is missing, misshapen, or not of its kind.
    """
    from pydantic import ValidationError

    from prunecli.results.schemas import SCHEMAS

    try:
        return SCHEMAS[format].model_validate(payload)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise DataError(f"{path}: {where + ': ' if where else ''}{fault['msg']}") from error
