from pathlib import Path

import pytest

from tests.families import tiny_family


class _Models(dict[str, Path]):
    """Case -> its tiny checkpoint, written when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, case: str) -> Path:
        self[case] = tiny_family(self._folder / case, case)
        return self[case]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Tiny checkpoints that no test changes."""
    return _Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    """Commands write into the working directory, and look for the checkpoints and results in it."""
    monkeypatch.chdir(tmp_path)
