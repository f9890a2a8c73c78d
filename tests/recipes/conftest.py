"""Where recipes are read and run: a folder with text and a checkpoint."""

import pytest

from tests.tiny import write_files


@pytest.fixture(autouse=True)
def _workplace(in_an_empty_folder):
    write_files("text", {"val.a": "one\n"})
    write_files("base", {"config.json": "{}"})
