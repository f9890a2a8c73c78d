"""Where recipes are read and run: a folder with text and a checkpoint."""

import pytest

from tests.tiny import write_files


@pytest.fixture(autouse=True)
def _workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files("text", {"val.a": "one\n"})
    write_files("base", {"config.json": "{}"})
