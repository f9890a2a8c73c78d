"""Finished translations, kept until the whole result is written, so that an interrupted run continues."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prunecli.evaluation.decoding import Translation
from prunecli.tensors.json_files import lenient, parsed


def key_of(fields: Mapping[str, Any]) -> str:
    """One name for everything that the translations depend on."""
    text = json.dumps(fields, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class PartialTranslations:
    """The translations that an earlier run finished, and the file that this one adds to.

    Each line of the file is one finished (checkpoint, pair): {"key", "run", "dtype", "translations"}, of which the last
    is [[text, finished]]. A line that was cut short by the interrupt is left out.

    Attributes:
        path: of the file; None: nothing is kept.
        dtypes: `run` -> the type that it computed in, which another free memory might choose otherwise.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._finished: dict[str, list[Translation]] = {}
        self.dtypes: dict[str, str] = {}
        if path is not None and path.is_file():
            for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
                self._take(line)

    @lenient
    def _take(self, line: str) -> None:
        entry = parsed(line)
        translations = [Translation(str(text), bool(finished)) for text, finished in entry["translations"]]
        self._finished[str(entry["key"])] = translations
        self.dtypes[str(entry["run"])] = str(entry["dtype"])

    def __len__(self) -> int:
        return len(self._finished)

    def get(self, key: str, count: int) -> list[Translation] | None:
        """The `count` translations under `key`, or None where they are not (all) there."""
        translations = self._finished.get(key)
        return translations if translations is not None and len(translations) == count else None

    def add(self, key: str, translations: Sequence[Translation], run: str, dtype: str) -> None:
        """Keep finished translations of `run`, computed in `dtype`, on the disk before this returns."""
        self._finished[key] = list(translations)
        if self.path is None:
            return
        rows = [[translation.text, translation.finished] for translation in translations]
        entry = {"key": key, "run": run, "dtype": dtype, "translations": rows}
        with self.path.open("a", encoding="utf-8") as file:
            # A line that an interrupt cut short has no end: start on a new one.
            file.write("\n" + json.dumps(entry, ensure_ascii=False))
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """The result is written: nothing to go on from any more."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
