"""The public names, and the page that shows them."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from numpy.typing import NDArray

import prunecli

PUBLIC = [
    getattr(prunecli, name) for name in prunecli.__all__ if name not in ("demo", "results", "__version__")
]
JSON = ("config", "settings")
"""Names of what holds keys of a config.json, of which nobody knows what each is."""
PAGE = Path(__file__).parent.parent / "docs" / "api.md"
NOTEBOOK = PAGE.with_name("prune-experts.ipynb")


def test_every_public_name_is_there() -> None:
    for name in prunecli.__all__:
        assert getattr(prunecli, name) is not None, name
    assert set(prunecli.__all__) <= set(dir(prunecli))
    with pytest.raises(AttributeError, match="no_such_name"):
        prunecli.no_such_name


def test_importing_prunecli_imports_nothing_heavy() -> None:
    heavy = "{name for name in ('torch', 'transformers', 'pandas') if name in sys.modules}"
    script = f"import sys, prunecli; print({heavy})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) > 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)


def test_the_notebook_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel: its cells are plain Python, and the last cell shows a translation and its reference."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for source in sources:
        exec(compile(source, str(NOTEBOOK), "exec"), names)
    assert names["scores"]["chrf++"].min() > 90
    shown = [cell["outputs"] for cell in cells if cell["cell_type"] == "code" and not cell["outputs"]]
    assert shown == [], "each cell was run before it was saved"


def test_the_page_names_every_function() -> None:
    page = PAGE.read_text(encoding="utf-8")
    functions = [name for name in prunecli.__all__ if name.islower() and name not in ("demo", "results")]
    assert [name for name in functions if name not in page and name != "__version__"] == []


@cache
def checked_alone(module: str) -> dict[str, Any]:
    """What a module imports for type checkers alone."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    blocks = [
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    names: dict[str, Any] = {}
    for block in blocks:
        exec(ast.unparse(ast.Module(block.body, [])), names)
    return names


def functions_of(public: Any) -> Iterator[Any]:
    """A function itself; the public methods and properties of a class, and how it is made."""
    if inspect.isfunction(public):
        yield public
        return
    for name, member in [*vars(public).items()]:
        member = getattr(member, "fget", None) or getattr(member, "func", None) or member
        member = getattr(member, "__func__", member)
        if (
            inspect.isfunction(member)
            and member.__module__.startswith("prunecli")
            and (not name.startswith("_") or name == "__init__")
        ):
            yield member


def hints(public: Any) -> dict[str, Any]:
    return get_type_hints(
        public, localns=checked_alone(public.__module__) | vars(sys.modules[public.__module__])
    )


def holds_any(hint: Any) -> bool:
    if hint == NDArray[np.float64]:  # of any shape
        return False
    return hint is Any or any(holds_any(part) for part in get_args(hint))


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_types_say_what_goes_in_and_what_comes_out(public: Any) -> None:
    for function in functions_of(public):
        found = hints(function)
        untyped = set(inspect.signature(function).parameters) - {*found, "self", "cls"}
        assert untyped == set(), function
        assert [name for name, hint in found.items() if name not in JSON and holds_any(hint)] == [], function


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_docstrings_say_what_each_thing_is(public: Any) -> None:
    described = inspect.getdoc(public) or ""
    assert described, public
    if is_dataclass(public):
        lacking = [
            field.name for field in fields(public) if not re.search(rf"\b{field.name}\b[^\n]*: ", described)
        ]
        assert lacking == [], "Attributes"
    elif inspect.isfunction(public):
        several = len(inspect.signature(public).parameters) > 3
        assert not several or "Args" in described
        assert "Raises" in described
    for function in functions_of(public):
        assert function.__name__ == "__init__" or inspect.getdoc(function), function


def test_type_checkers_know_every_name_as_public() -> None:
    tree = ast.parse(Path(prunecli.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    shown = {
        alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {"__version__", *shown} == set(prunecli.__all__)


def test_words_that_are_no_choice_are_refused() -> None:
    for make, remedy in (
        (lambda: prunecli.CollectOptions(mode="greedy"), "forced, beam"),
        (lambda: prunecli.FfnOptions(encoder="merge"), "share, keep, drop"),
        (lambda: prunecli.HeadOptions(attention=("encoder", "self")), "encoder, decoder, cross"),
        (lambda: prunecli.TrainingOptions(train="layers"), "all, routers, embeddings, experts"),
    ):
        with pytest.raises(prunecli.PruneError, match="no such choice") as caught:
            make()
        assert caught.value.remedy == f"Choose one of {remedy}."
    assert prunecli.FfnOptions(width=512).width == 512
    assert prunecli.FfnOptions(width="match").width == "match"
