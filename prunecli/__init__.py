"""prunecli: make pretrained transformers smaller and faster.

The same few calls that the commands make, for a notebook or a program:

    model = prunecli.open_model("facebook/nllb-moe-54b")
    plan = prunecli.plan_experts(model, prunecli.ExpertOptions(gates=(Path("gates.json"),)))
    prunecli.apply(model, prunecli.cut(model, plan), "pruned")

Names are imported when they are first used: `import prunecli` imports neither torch nor transformers.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.3.0"
PACKAGE = "the Python package prunecli"
"""What cards and errors say is needed; an address belongs here once there is one. No package index has it yet."""

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOME = {
    alias.name: str(node.module)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Public name -> module that defines it, or package that holds it as a module."""

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME[name]
    value = import_module(f"{home}.{name}") if home == __name__ else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
