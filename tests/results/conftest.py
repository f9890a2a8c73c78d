import pytest

from prunecli import results
from prunecli.tensors.transaction import write_json


@pytest.fixture
def read(tmp_path):
    """Writes a payload as a result, and reads it."""

    def written(payload):
        write_json(tmp_path / "result.json", payload, force=True)
        return results.read(tmp_path / "result.json")

    return written
