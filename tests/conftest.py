"""Every test runs without the network, and on one thread: those of several workers would wait for each other."""

import functools
import gc
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests start processes; without bytecode each would compile every module anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("COLUMNS", None)  # some shells export their own; messages would be wrapped

# A busy machine is no fault of the code. Each run draws other examples.
settings.register_profile("prunecli", deadline=None, max_examples=40)
settings.load_profile("prunecli")


def pytest_configure() -> None:
    """Signals act as in a terminal: a run under nohup, or in the background, would hand ignored ones on to commands."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Imported modules and cached answers stay: the garbage collector would go through them again and again.

    Many tests open models of the same few configs, whose classes take seconds to answer: every answer is kept.
    """
    probed = sys.modules.get("prunecli.model.probed")
    if probed is not None and probed._asked.cache_parameters()["maxsize"]:
        probed._asked = functools.cache(probed._asked.__wrapped__)
        sys.modules["prunecli.model.trial"]._KNOWN = {}
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """Tests write into the working directory, and commands look for checkpoints and results in it."""
    monkeypatch.chdir(tmp_path)


class _Models(dict[str, Path]):
    """Case -> its tiny checkpoint, written when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, case: str) -> Path:
        from tests.families import tiny_family

        self[case] = tiny_family(self._folder / case, case)
        return self[case]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Tiny checkpoints that no test changes."""
    return _Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory):
    """A directory of all tests of a module."""
    return tmp_path_factory.mktemp("shared")
