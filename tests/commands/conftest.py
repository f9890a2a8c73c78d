from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write into the working directory, and look for the checkpoints and results in it."""
    monkeypatch.chdir(tmp_path)
