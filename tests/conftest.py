"""Every test runs without the network, and on one thread: those of several workers would wait for each other."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests start processes; without bytecode each would compile every module anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("COLUMNS", None)  # some shells export their own; messages would be wrapped

settings.register_profile("prunecli", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("prunecli")


def pytest_configure() -> None:
    """Signals act as in a terminal: a run under nohup, or in the background, would hand ignored ones on to commands."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Modules stay to the end; the garbage collector would go through them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
