import pytest


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    """Commands write into the working directory, and look for the checkpoints and results in it."""
    monkeypatch.chdir(tmp_path)
