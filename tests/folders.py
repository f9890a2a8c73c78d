import pytest


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """Tests write into the working directory, and commands look for checkpoints and results in it."""
    monkeypatch.chdir(tmp_path)
