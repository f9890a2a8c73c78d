"""Bars of transformers, which heed no --quiet and stand between a command's own lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_bars() -> Iterator[None]:
    """Without them, whatever they were set to before."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
