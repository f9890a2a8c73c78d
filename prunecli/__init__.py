"""prunecli: make pretrained transformers smaller and faster.

`load_model(DIR)` opens every checkpoint that prunecli writes, and the stock ones of the families it knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
PACKAGE = "the Python package prunecli"
"""What cards and errors say is needed; an address belongs here once there is one. No package index has it yet."""

__all__ = ["__version__", "load_model"]

if TYPE_CHECKING:
    from prunecli.modules.loading import load_model


def __getattr__(name: str) -> Any:
    # torch is imported only by those who load a model, so that `prunecli --help` answers at once.
    if name == "load_model":
        from prunecli.modules.loading import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
